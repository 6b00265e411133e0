"""One arm of the suite about weights that are not trained, in a process of its own.

The first order says what is made; then ``{"tokens": n}`` generates so many, ``{"steps": n}`` trains
so many steps of an adapter.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .machine import OtherWork
from .memory_group import limit_memory
from .serving import serve
from .worker import kernel_bytes, peak_rss_bytes, rss_bytes

PROMPT = 16  # tokens
RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _config(folder: Path) -> Any:
    import transformers

    return transformers.LlamaConfig(**json.loads((folder / "config.json").read_text()))


def _empty(folder: Path) -> Any:
    """The model of a folder, without memory for its weights."""
    import transformers

    import overspill

    with overspill.empty_init():
        return transformers.AutoModelForCausalLM.from_config(
            _config(folder), dtype=torch.bfloat16
        ).eval()


def _loaded(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def _accelerated(folder: Path, offload: Path) -> Any:
    """All layers on disk, each read before it runs: accelerate's own way."""
    import accelerate
    import transformers

    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(_config(folder), dtype=torch.bfloat16)
    places: dict[str, str] = {f"model.layers.{n}": "disk" for n in range(len(model.model.layers))}
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        places[name] = "disk"
    places["model.rotary_emb"] = "cpu"
    return accelerate.load_checkpoint_and_dispatch(
        model, folder, device_map=places, offload_folder=offload, dtype=torch.bfloat16
    ).eval()


def _adapted(model: Any) -> Any:
    import peft

    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=TARGETS)).train()


class Arm:
    """A model with what serves it.  ``made_s``: seconds that making it took."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        folder, how = Path(spec["folder"]), spec["how"]
        self._batch, self._tokens = spec["batch"], spec.get("tokens", 0)
        self._optimizer: Any = None
        model = None
        if how == "overspill":
            model = _adapted(_empty(folder)) if self._tokens else _empty(folder)
        self._idle = rss_bytes()
        self.limited = spec["limit"] is not None and limit_memory(spec["limit"] + self._idle)
        written = kernel_bytes()[1]
        started = time.perf_counter()
        if how == "accelerate":
            model = _accelerated(folder, Path(spec["store"]))
        elif how == "memory":
            model = _adapted(_loaded(folder)) if self._tokens else _loaded(folder)
        self.model: Any = model
        self._make_optimizer(folder, how, spec["options"])
        self.facts = {
            "made_s": time.perf_counter() - started, "limited": self.limited,
            "written_bytes": kernel_bytes()[1] - written,
            "rss_bytes": rss_bytes() - self._idle, "idle_bytes": self._idle,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }  # fmt: skip

    def _make_optimizer(self, folder: Path, how: str, options: dict[str, Any]) -> None:
        import overspill

        trained = [p for p in self.model.parameters() if p.requires_grad] if self._tokens else []
        if how == "overspill":
            adamw = torch.optim.AdamW(trained, lr=1e-3) if trained else None
            given = {"device": "cpu", "weights": folder, **options}
            self._optimizer = overspill.wrap(self.model, adamw, **given)
            atexit.register(self._optimizer.close)
        elif trained:
            self._optimizer = overspill.optim.AdamW(trained, lr=1e-3)  # of the same bits
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in trained:  # adapters begin alike, wherever their base was
                p.copy_(0.02 * torch.randn(p.shape, generator=draw))

    def _ids(self, length: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        return torch.randint(0, vocabulary, (self._batch, length), generator=draw)

    def _generate(self, tokens: int) -> list[int]:
        ids = self._ids(PROMPT)
        with torch.no_grad():
            made = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                min_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
        found: list[int] = made[:, PROMPT:].flatten().tolist()
        return found

    def _train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            ids = self._ids(self._tokens)
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """See the module."""
        read, written = kernel_bytes()
        cpu_s, started = time.process_time(), time.perf_counter()
        with OtherWork() as others:
            if "tokens" in order:
                made: list[Any] = self._generate(order["tokens"])
                count = order["tokens"]
            else:
                made, count = self._train(order["steps"]), order["steps"]
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
        after = kernel_bytes()
        return {
            "seconds": seconds / count, "cpu_s": cpu_s / count, "made": made,
            "others": others.share,
            "read_bytes": (after[0] - read) // count,
            "written_bytes": (after[1] - written) // count,
            "peak_rss_bytes": peak_rss_bytes(), "idle_bytes": self._idle,
        }  # fmt: skip


def begin(order: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """Makes the arm."""
    arm = Arm(order)
    return arm.facts, arm.answer


if __name__ == "__main__":
    serve(begin)
