"""Weights that are not trained: a model that only generates, beside accelerate's disk offload; an
adapter over a base that does not fit, or whose files are quantised; and how soon a large base is
wrapped.

Models are of a Llama's shape, made here; arms are processes of their own, each with a limit for all
its memory where control groups allow it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .arms import GIB
from .memory_group import remove_groups
from .process import Process
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Row, Sample, run_interleaved

MIB = 1 << 20
INDEX = "model.safetensors.index.json"
QUANTISED = ("nf4", "fp8")  # methods of files
BESIDE = 448 << 20  # what a process takes beside the engine: the KV cache, results, code
LIMIT_S = 900.0


@dataclass(frozen=True)
class Llama:
    """A shape; see ``LlamaConfig``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


@dataclass(frozen=True)
class Sizes:
    """``room``: of the engine, to generate; ``base_room``, under an adapter."""

    shape: Llama
    large: Llama
    room: int
    base_room: int
    tokens: int
    batches: tuple[int, ...]
    length: int
    rounds: int


QUICK = Sizes(
    Llama(256, 768, 8, 4, 4, 2048), Llama(256, 768, 16, 4, 4, 2048), 12 * MIB, 12 * MIB, 4, (1,),
    64, 2,
)  # fmt: skip
FULL = Sizes(
    Llama(2048, 5632, 24, 32, 32, 32000), Llama(4096, 14336, 32, 32, 8, 128256), GIB, 600 * MIB,
    8, (1, 8), 256, 3,
)  # fmt: skip


def make_files(shape: Llama, folder: Path, shard_bytes: int = 2 * GIB) -> None:
    """A folder as the hub has them: bf16 weights drawn by a seed, in shards."""
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(**asdict(shape), tie_word_embeddings=False)
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(config).state_dict()
    folder.mkdir(parents=True)
    draw, index, shard, held = torch.Generator().manual_seed(0), {}, {}, 0
    names = list(state)
    for name in names:
        size = tuple(state[name].shape)
        if len(size) == 1:
            shard[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            drawn = torch.empty(size, dtype=torch.bfloat16)
            shard[name] = drawn.normal_(0.0, 0.02, generator=draw)
        held += shard[name].nbytes
        if held >= shard_bytes or name == names[-1]:
            file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            index.update(dict.fromkeys(shard, file))
            shard, held = {}, 0
    content = {"metadata": {}, "weight_map": index}
    (folder / INDEX).write_text(json.dumps(content))
    (folder / "config.json").write_text(config.to_json_string())


def quantise_files(folder: Path, out: Path, method: str, *, plain: Path | None = None) -> None:
    """Write a folder of ``make_files`` again with its layers quantised.

    Args:
        method: ``"fp8"`` in blocks of 128 x 128, or ``"nf4"`` of bitsandbytes.
        plain: where to write the values that the layers have then, in bf16.
    """
    from safetensors.torch import load_file, save_file

    quantise = {"fp8": _fp8, "nf4": _nf4}[method]
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    written: dict[str, str] = {}
    for each in filter(None, (out, plain)):
        each.mkdir(parents=True)
    for file in dict.fromkeys(index.values()):
        codes, values = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, weight in load_file(folder / file).items():
            of_layer = ".layers." in name and weight.dim() == 2
            made, value = quantise(name, weight) if of_layer else ({name: weight}, weight)
            codes |= made
            values[name] = value
        save_file(codes, out / file, metadata={"format": "pt"})
        written |= dict.fromkeys(codes, file)
        if plain is not None:
            save_file(values, plain / file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for each, names in ((out, written), (plain, index)):
        if each is not None:
            (each / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
            (each / "config.json").write_text(json.dumps(config))
    how = {"fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
           "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True}}  # fmt: skip
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": how[method]}))


def _fp8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = weight.shape
    blocks = weight.float().view(rows // 128, 128, columns // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    value = (codes.float() * scales[:, None, :, None]).view(rows, columns).to(weight.dtype)
    return {name: codes.view(rows, columns), f"{name}_scale_inv": scales}, value


def _nf4(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    more = {f"{name}.{key}": each for key, each in state.as_dict(packed=True).items()}
    return {name: codes, **more}, dequantize_4bit(codes, state)


class Served:
    """An arm: a process that makes a model and answers.  ``order``: of a sample."""

    def __init__(self, name: str, spec: Mapping[str, Any], order: Mapping[str, Any]) -> None:
        self.name, self._spec, self._order = name, dict(spec), dict(order)
        self._process: Process | None = None

    def start(self) -> Mapping[str, Any]:
        self._process = Process("frozen_worker")
        facts = self._process.ask(self._spec, LIMIT_S)
        if self._order:
            self._process.ask(dict.fromkeys(self._order, 1), LIMIT_S)  # records the order
        return facts

    def sample(self) -> Sample:
        assert self._process is not None
        seen = self._process.ask(self._order, LIMIT_S)
        return Sample(seen.pop("seconds"), seen)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
            remove_groups()


def _seen(row: Row, key: str) -> Any:
    return row.samples[-1].seen.get(key) if row.samples else None


def _mib(value: float | None) -> str:
    return number(None if value is None else value / MIB, " MiB", 4)


def _rss(row: Row) -> str:
    peak, idle = _seen(row, "peak_rss_bytes"), _seen(row, "idle_bytes")
    return _mib(None if peak is None else peak - idle)


def _generation(sizes: Sizes, folder: Path, store: Path, batch: int) -> Comparison:
    """Tokens by tokens; greedy, so that all arms must make the same ones."""
    limit = sizes.room + BESIDE
    spec = {"folder": str(folder), "batch": batch, "options": {}, "store": str(store / "offload")}
    room = {"host_memory": sizes.room}
    arms = [
        Served("accelerate, disk offload", {**spec, "how": "accelerate", "limit": limit},
               {"tokens": sizes.tokens}),
        Served("overspill, in place", {**spec, "how": "overspill", "limit": limit,
                                       "options": room}, {"tokens": sizes.tokens}),
        Served("in memory", {**spec, "how": "memory", "limit": None}, {"tokens": sizes.tokens}),
        Served("overspill, nf4", {**spec, "how": "overspill", "limit": None,
                                  "options": {**room, "frozen": "nf4"}},
               {"tokens": sizes.tokens}),
        *(Served(f"overspill, {method} files in place",
                 {**spec, "how": "overspill", "limit": None, "folder": str(store / method),
                  "options": room}, {"tokens": sizes.tokens}) for method in QUANTISED),
    ]  # fmt: skip
    rows = run_interleaved(arms, sizes.rounds)
    theirs = _seen(rows[2], "made")

    def same(row: Row) -> str:
        return "yes" if _seen(row, "made") == theirs else "no"

    def rate(row: Row) -> str:
        return number(row.median_s and batch / row.median_s)

    columns: list[Column] = [
        ("tokens/s", rate),
        ("time over the first", spread),
        ("the tokens of the model in memory", same),
        ("beside torch, peak", _rss),
        ("read a token", lambda row: _mib(_seen(row, "read_bytes"))),
        ("limited", lambda row: "yes" if row.facts.get("limited") else "no"),
        ("others", others),
    ]
    billions = rows[0].facts.get("parameters", 0) / 1e9
    title = (
        f"Generation, {billions:.2g} B parameters, bf16, batch {batch}, "
        f"{sizes.room / GIB:.3g} GiB of host memory"
    )
    return Comparison(title, asdict(sizes), rows, columns)


def _adapters(sizes: Sizes, folder: Path, store: Path) -> Comparison:
    """Steps of an adapter of rank 16."""
    spec = {"folder": str(folder), "batch": 1, "tokens": sizes.length, "limit": None}
    arms = [Served("torch and peft, in memory", {**spec, "how": "memory", "options": {}},
                   {"steps": 1})]  # fmt: skip
    for form in (None, "int8", "nf4"):
        place = store / f"adapter-{form}"
        place.mkdir()
        options = {"nvme": str(place), "host_memory": sizes.base_room, "activations": "keep",
                   "frozen": form}  # fmt: skip
        name = f"overspill, {form or 'in place'}"
        arms.append(Served(name, {**spec, "how": "overspill", "options": options}, {"steps": 1}))
    title = (
        f"LoRA over a base in {sizes.base_room / MIB:.0f} MiB of host memory, activations beside "
        f"it, {sizes.length} tokens a step"
    )
    return _steps(title, arms, sizes)


def _adapters_over_files(sizes: Sizes, store: Path, method: str) -> Comparison:
    """Steps over a base that is quantised in its files, beside the dequantised one in memory."""
    out, plain = store / method, store / f"{method}-plain"
    spec = {"batch": 1, "tokens": sizes.length, "limit": None}
    place = store / f"{method}-store"
    place.mkdir()
    options = {"host_memory": sizes.base_room, "nvme": str(place), "activations": "keep"}
    arms = [
        Served("torch and peft, dequantised, in memory",
               {**spec, "folder": str(plain), "how": "memory", "options": {}}, {"steps": 1}),
        Served(f"overspill, {method} files in place",
               {**spec, "folder": str(out), "how": "overspill", "options": options}, {"steps": 1}),
    ]  # fmt: skip
    in_files = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    title = (
        f"LoRA over {method} files of {in_files / MIB:.0f} MiB in {sizes.base_room / MIB:.0f} MiB "
        f"of host memory, {sizes.length} tokens a step"
    )
    return _steps(title, arms, sizes)


def _steps(title: str, arms: list[Served], sizes: Sizes) -> Comparison:
    """Steps of each arm, beside those of the first."""
    rows = run_interleaved(arms, sizes.rounds)

    def losses(row: Row) -> list[Any]:
        return [sample.seen.get("made") for sample in row.samples]

    def same(row: Row) -> str:
        return "yes" if losses(row) and losses(row) == losses(rows[0]) else "no"

    columns: list[Column] = [
        ("step", lambda row: number(row.median_s, " s")),
        ("over the first", spread),
        ("beside torch, peak", _rss),
        ("read a step", lambda row: _mib(_seen(row, "read_bytes"))),
        ("written a step", lambda row: _mib(_seen(row, "written_bytes"))),
        ("loss", lambda row: number((_seen(row, "made") or [None])[-1], "", 6)),
        ("all losses of the first", same),
        ("made in", lambda row: number(row.facts.get("made_s"), " s")),
        ("others", others),
    ]
    return Comparison(title, asdict(sizes), rows, columns)


def _wrapped(sizes: Sizes, folders: Mapping[str, Path]) -> Comparison:
    """How soon a base is there, by the format of its files, and what that takes."""
    arms = []
    for form, folder in folders.items():
        spec = {"folder": str(folder), "batch": 1, "how": "overspill", "limit": None}
        arms += [
            Served(f"generation, {form}", {**spec, "options": {"host_memory": 2 * GIB}}, {}),
            Served(f"LoRA, {form}", {**spec, "tokens": 8, "options": {"host_memory": 4 * GIB}}, {}),
        ]
    rows = []
    for arm in arms:
        facts = arm.start()
        arm.close()
        rows.append(Row(arm.name, facts, (), median_s=facts["made_s"]))
    columns: list[Column] = [
        ("parameters", lambda row: number(row.facts["parameters"] / 1e9, " B")),
        ("wrap", lambda row: number(row.median_s, " s")),
        ("written", lambda row: _mib(row.facts["written_bytes"])),
        ("resident, beside torch", lambda row: _mib(row.facts["rss_bytes"])),
    ]
    return Comparison("wrap of a base that is read in place", asdict(sizes), rows, columns)


def _large(sizes: Sizes, store: Path) -> Comparison:
    folders = {"bf16": store / "large"}
    make_files(sizes.large, folders["bf16"])
    for method in QUANTISED:
        folders[method] = store / f"large-{method}"
        quantise_files(folders["bf16"], folders[method], method)
    return _wrapped(sizes, folders)


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite; its files live in ``folder`` as long as it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="store-") as made:
        store = Path(made)
        make_files(sizes.shape, store / "model")
        for method in QUANTISED:
            plain = store / f"{method}-plain"
            quantise_files(store / "model", store / method, method, plain=plain)
        found = [_generation(sizes, store / "model", store, batch) for batch in sizes.batches]
        found.append(_adapters(sizes, store / "model", store))
        for method in QUANTISED:
            found.append(_adapters_over_files(sizes, store, method))
        found.append(_large(sizes, store))
    return outcome("frozen", found, folder)
