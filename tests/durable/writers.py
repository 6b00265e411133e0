"""Everything of the product that writes files outside a store, with two contents to tell apart.

A writer is prepared in a process of its own, in a folder that is the current one, and then writes
its target there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overspill
from tests.devices import CPU

Write = Callable[[], object]
# Their contents depend on times or on the process: that they load is all that is asked of them.
VOLATILE = ("training_args.bin", "rng_state.pth", "random_states_0.pkl")
AMPLE: dict[str, Any] = {"device": CPU, "host_memory": "1GiB", "rates": overspill.Rates()}


@dataclass(frozen=True)
class Writer:
    """One writer.

    Attributes:
        target: the file or folder that it writes, below the current folder.
        prepare: takes 1 or 2, for one or the other content, and returns what then writes it.
        sources: files of the product that write to the disk here.
        entries: files of the target without which nothing reads it; none: the target itself.
        again: whether it may write over what is there.
        slow: its preparation trains.
        beside: a file that is in the target before, and must stay.
        contents: what a reader gets; default: the bytes of all files.
    """

    target: str
    prepare: Callable[[int], Write]
    sources: tuple[str, ...]
    entries: tuple[str, ...] = ()
    again: bool = True
    slow: bool = False
    beside: str | None = None
    contents: Callable[[Path], Any] | None = None

    def read(self, folder: Path) -> Any:
        """What a reader finds in the target; ``None``: nothing that it would open.

        Raises:
            Exception: a file is torn.
        """
        target = folder / self.target
        if not target.exists() or not all((target / name).exists() for name in self.entries):
            return None
        found = digests(target) if self.contents is None else self.contents(target)
        return found or None


def import_all() -> None:
    """Import what any writer needs, once, before processes are forked."""
    import matplotlib.backends.backend_agg  # noqa: F401
    import peft  # noqa: F401

    import overspill.cli.app
    import overspill.durable.export
    import overspill.train.job  # noqa: F401
    import tests.integrations.test_accelerate
    import tests.integrations.test_lightning
    import tests.integrations.test_transformers
    import tests.unit.test_train_job  # noqa: F401
    from overspill.optim.bench import update_costs  # noqa: F401
    from overspill.train.shapes import find_model

    find_model("gpt2-1m")


def digests(target: Path) -> dict[str, str]:
    """The contents of all files of a target that its readers may see."""
    files = [target] if target.is_file() else sorted(each for each in target.rglob("*"))
    found: dict[str, str] = {}
    for file in files:
        inner = file.relative_to(target)
        if not file.is_file() or any(part.startswith(".") for part in inner.parts):
            continue
        if file.name in VOLATILE:
            torch.load(file, weights_only=False)
            found[str(inner)] = "loads"
        else:
            found[str(inner)] = sha256(file.read_bytes()).hexdigest()
    return found


# -- small files ---------------------------------------------------------------------------------


def rates(value: int) -> Write:
    made = overspill.Rates(h2d_bytes_s=float(value))
    return lambda: made.to_file("rates.json")


def calibration(value: int) -> Write:
    from overspill.measure.calibration import Calibration

    made = Calibration(Path("kept/rates.json"), {}, overspill.Rates(h2d_bytes_s=float(value)))
    return made.keep


def settings(value: int) -> Write:
    from overspill.io_engine.backend import Tuning
    from overspill.io_engine.settings import remember

    os.environ["OVERSPILL_CACHE"] = os.path.abspath("kept")
    return lambda: remember(Path(), Tuning("threads", 4096, value))


def recorded(value: int) -> Any:
    from overspill.facts.trace import LANES, Trace

    trace = Trace(origin_ns=0)
    at = 0
    for index in range(1, value + 1):
        for number, lane in enumerate(LANES):
            trace.add(lane, lane, at + number * 10**6, at + (number + 3) * 10**6, 10**6)
        trace.level(at, value << 20, value << 20, 0)
        at += 10**7
        trace.mark_step(index, at)
    return trace


def trace(value: int) -> Write:
    from overspill.observe.trace_files import save_trace

    made = recorded(value)
    return lambda: save_trace(made, Path("trace.json"))


def timeline(value: int) -> Write:
    from overspill.observe.trace_files import save_trace

    made = recorded(value)
    return lambda: save_trace(made, Path("trace.png"))


def memory(value: int) -> Write:
    from overspill.observe.memory_picture import draw_memory

    made = recorded(value)
    return lambda: draw_memory(made, Path("memory.png"))


def loss(value: int) -> Write:
    from overspill.observe.pictures import draw_loss

    return lambda: draw_loss({"loss": [1.0 / value, 0.5]}, Path("loss.png"))


def run_json(value: int) -> dict[str, Any]:
    return {"model": f"model {value}", "steps": [], "memory": {}, "plan": {}, "step_s": 1.0}


def page(value: int) -> Write:
    from overspill.observe.page import write_page
    from overspill.observe.trace_files import save_trace

    Path("run").mkdir(exist_ok=True)
    Path("run/run.json").write_text(json.dumps(run_json(value)))
    save_trace(recorded(2), Path("run/trace.json"))
    return lambda: write_page(Path("run"))


def page_elsewhere(value: int) -> Write:
    page(value)
    return lambda: command("report", "run", "--out", "page.html")


def command(*arguments: str) -> None:
    from typer.testing import CliRunner

    from overspill.cli.app import app

    result = CliRunner().invoke(app, [*arguments, "--debug"])
    if result.exception is not None:
        raise result.exception


def bench_io(value: int) -> Write:
    from overspill.cli import bench_io as cli
    from overspill.io_engine.backend import Tuning
    from overspill.io_engine.bench import BenchReport, Measurement

    tuning = Tuning("threads", 1 << 20, 4)
    figures = [
        Measurement(mode, tuning, value * 1e9, 0.1, 0.001, 0.002, 0.003)
        for mode in ("read", "write", "both")
    ]
    report = BenchReport("here", 1 << 20, True, tuple(figures), tuning, None)
    Path("bench").mkdir(exist_ok=True)
    return lambda: cli._save(report, {"value": value}, Path("bench"))


def bench_optim(value: int) -> Write:
    words = ["bench", "optim", "--parameters", str(1000 * value), "--quick", "--rounds", "1"]
    return lambda: command(*words, "--out", "bench")


def numel_of(file: Path) -> Any:
    return json.loads(file.read_text())["numel"]


# -- weights and state ---------------------------------------------------------------------------


def filled(value: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def weights(value: int) -> Write:
    from overspill.train.save import save_weights

    model = filled(value)
    return lambda: save_weights(model, Path("weights.safetensors"))


def masters(value: int) -> Write:
    from overspill.train.save import save_masters

    model = filled(value)
    overspill.wrap(model, torch.optim.AdamW(model.parameters()), precision="bf16", **AMPLE)
    return lambda: save_masters(model, Path("masters.safetensors"))


def export(value: int) -> Write:
    from overspill.durable.export import write_export
    from overspill.durable.hub import ModelFiles
    from overspill.durable.tensors import in_memory

    tensors = [in_memory(f"w{i}", torch.full((300, 300), float(value))) for i in range(4)]
    tree = {"state": {0: {"exp_avg": in_memory("m", torch.full((300, 300), 1.0 * value))}},
            "param_groups": []}  # fmt: skip
    models = [ModelFiles(tensors, "{}")]
    return lambda: write_export(Path("out"), models, tree, value, shard_bytes=800_000)


def saved(value: int) -> Write:
    model = filled(value)
    Path("store").mkdir(exist_ok=True)
    for left in Path("store").iterdir():
        left.unlink()
    inner = torch.optim.AdamW(model.parameters(), lr=0.0)
    optimizer = overspill.wrap(model, inner, nvme="store", **AMPLE)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    return lambda: optimizer.save("out")


# -- frameworks ----------------------------------------------------------------------------------


def trainer(value: int, **more: Any) -> Any:
    from overspill.integrations.transformers import OverspillTrainer
    from tests.integrations.test_transformers import Rows, arguments, llama

    given = {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no", "seed": value, **more}
    made = OverspillTrainer(
        llama(value), arguments(Path("run"), **given), train_dataset=Rows(), overspill=AMPLE
    )
    made.train()
    made.state.log_history.clear()  # it has times
    return made


def checkpoint(value: int) -> Write:
    made = trainer(value)
    return lambda: made._save_checkpoint(made.model, None)


def model_folder(value: int) -> Write:
    made = trainer(value)
    return lambda: made.save_model("model")


def adapters(value: int) -> Write:
    import peft

    from overspill.integrations.transformers import OverspillTrainer
    from tests.integrations.test_transformers import Rows, arguments, llama

    model = llama()
    torch.manual_seed(value)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    given = {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no", "seed": value}
    made = OverspillTrainer(
        model, arguments(Path("run"), **given), train_dataset=Rows(), overspill=AMPLE
    )
    made.train()
    made.state.log_history.clear()
    return lambda: made._save_checkpoint(made.model, None)


def accelerator(value: int, *, automatic: bool) -> Any:
    from tests.integrations.test_accelerate import Run

    run = Run(Path("project"), {**AMPLE, "durable": False}, seed=value)
    run.accelerator.project_configuration.automatic_checkpoint_naming = automatic
    run.train(count=2)
    return run.accelerator


def state(value: int) -> Write:
    from overspill.integrations.accelerate import save_state

    made = accelerator(value, automatic=False)
    return lambda: save_state(made, "state")


def numbered_state(value: int) -> Write:
    from overspill.integrations.accelerate import save_state

    made = accelerator(value, automatic=True)
    return lambda: save_state(made)


def lightning_file(value: int) -> Write:
    import lightning

    from overspill.integrations.lightning import OverspillStrategy
    from tests.integrations.test_lightning import Module, Rows

    module = Module(value)
    made = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        strategy=OverspillStrategy(**AMPLE),
    )  # fmt: skip
    made.fit(module, torch.utils.data.DataLoader(Rows(4), batch_size=2))
    return lambda: made.save_checkpoint("module.ckpt")


# -- the job -------------------------------------------------------------------------------------


def job(value: int) -> Write:
    from overspill.train.job import Job, run
    from tests.unit.test_train_job import Quiet

    Path("text.txt").write_text("All work and no play makes a dull boy. " * 200)

    class Trained(Quiet):
        """Waits where training ends, for the files come then."""

        def end(self) -> None:
            ready.pop()()

    ready: list[Callable[[], None]] = []
    offload = {"device": "sim", "device_memory": "3MiB", "host_memory": "64MiB"}
    made = Job(
        model="gpt2-1m", data=Path("text.txt"), steps=2, batch=1, seq=16, seed=value,
        out=Path("out"), offload=offload,
    )  # fmt: skip

    def write(begin: Callable[[], None] = lambda: None) -> None:
        ready.append(begin)
        run(made, Trained())

    return write


def of_job(folder: Path) -> Any:
    """The files of a run, each of which is whole, and of one seed or the other."""
    from overspill.observe.trace_files import load_trace

    found: dict[str, Any] = {}
    for name in ("run.json", "trace.json", "planned.json"):
        if (folder / name).exists():
            content = json.loads((folder / name).read_text())
            found[name] = content["seed"] if name == "run.json" else bool(load_trace(folder / name))
    for name in ("loss.png", "timeline.png", "memory.png"):
        if (folder / name).exists():
            assert (folder / name).read_bytes()[-8:-4] == b"IEND", name
    if (folder / "report.html").exists():
        assert (folder / "report.html").read_text().rstrip().endswith("</html>")
    return digests(folder / "model.safetensors"), digests(folder / "config.json")


IO, OBSERVE, FRAMEWORKS = "io_engine/", "offload/observe/", "offload/integrations/"
FILES = "offload/durable/files.py"
WRITERS: dict[str, Writer] = {
    "rates": Writer("rates.json", rates, ("offload/facts/rates.py",)),
    "calibration": Writer("kept/rates.json", calibration, ("offload/measure/calibration.py",)),
    "settings": Writer("kept", settings, (f"{IO}settings.py",)),
    "trace": Writer("trace.json", trace, (f"{OBSERVE}trace_files.py",)),
    "timeline": Writer("trace.png", timeline, (f"{OBSERVE}pictures.py",)),
    "memory": Writer("memory.png", memory, (f"{OBSERVE}pictures.py",)),
    "loss": Writer("loss.png", loss, (f"{OBSERVE}pictures.py",)),
    "page": Writer("run/report.html", page, (f"{OBSERVE}page.py",)),
    "page elsewhere": Writer("page.html", page_elsewhere, ("offload/cli/report.py",)),
    "bench io": Writer("bench/io.json", bench_io, ("offload/cli/bench_io.py",)),
    "bench io picture": Writer("bench/io.png", bench_io, (f"{OBSERVE}pictures.py",)),
    "bench optim": Writer(
        "bench/optim.json", bench_optim, ("offload/cli/bench_optim.py",), contents=numel_of
    ),
    "weights": Writer("weights.safetensors", weights, ("offload/train/save.py",)),
    "masters": Writer("masters.safetensors", masters, ("offload/train/save.py",)),
    "export": Writer("out", export, ("offload/durable/export.py", FILES), again=False),
    "save": Writer("out", saved, ("offload/durable/export.py",), again=False, slow=True),
    "checkpoint": Writer(
        "run/checkpoint-1", checkpoint, (f"{FRAMEWORKS}transformers.py",), slow=True
    ),
    "checkpoint among others": Writer(
        "run/checkpoint-1", checkpoint, (f"{FRAMEWORKS}transformers.py",), slow=True,
        entries=("trainer_state.json", "model.safetensors"), beside="notes.txt",
    ),
    "adapters": Writer(
        "run/checkpoint-1", adapters, (f"{FRAMEWORKS}transformers.py",), slow=True
    ),
    "model": Writer(
        "model", model_folder, (f"{FRAMEWORKS}transformers.py",), slow=True,
        entries=("model.safetensors",), beside="notes.txt",
    ),
    "state": Writer("state", state, (f"{FRAMEWORKS}accelerate.py",), slow=True),
    "state among others": Writer(
        "state", state, (f"{FRAMEWORKS}accelerate.py",), slow=True,
        entries=("model.safetensors", "optimizer.bin"), beside="notes.txt",
    ),
    "numbered state": Writer(
        "project/checkpoints/checkpoint_0", numbered_state, (f"{FRAMEWORKS}accelerate.py",),
        again=False, slow=True,
    ),
    "lightning": Writer(
        "module.ckpt", lightning_file, (f"{FRAMEWORKS}lightning.py",), slow=True
    ),
    "job": Writer(
        "out", job, ("offload/train/outputs.py", "offload/train/report.py"), slow=True,
        entries=("model.safetensors",), contents=of_job,
    ),
}  # fmt: skip
