"""Scripts of diffusers' shape with two changed lines: the losses and the files of the plain run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import overspill
from tests.devices import NAME, SIM, plainly

pytest.importorskip("diffusers")
SCRIPT = Path(__file__).with_name("scripts") / "diffusion.py"
STEPS = 4
# What is changed in the script, and nothing else.
ACCELERATOR = (
    "from accelerate import Accelerator\n",
    "from overspill.integrations.accelerate import OffloadAccelerator as Accelerator, wrap\n",
)
WRAP = (
    "scheduler = get_scheduler(",
    "optimizer = wrap(trained, optimizer, **OPTIONS)\nscheduler = get_scheduler(",
)
KINDS = [
    "unconditional", "text to image", "text to image lora", "dreambooth",
    "dreambooth with its text encoder", "flux lora", "sd3 lora", "wan lora",
]  # fmt: skip
DAILY = ("dreambooth with its text encoder",)
OPTIONS = {
    "device": SIM, "device_memory": "700KiB", "host_memory": "16MiB", "durable": False,
    "rates": overspill.Rates(),
}  # fmt: skip


class _Torch:
    """The module torch, with the optimizer whose bits ours has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    class optim:
        @staticmethod
        def AdamW(params: Any, **given: Any) -> Any:
            return plainly(overspill.optim.AdamW, list(params), **given)


def run(kind: str, out: Path, *, ours: bool, resume: str = "") -> list[float]:
    """Run the script, and return its losses."""
    text = SCRIPT.read_text(encoding="utf-8")
    for before, after in (ACCELERATOR, WRAP) if ours else ():
        assert text.count(before) == 1
        text = text.replace(before, after)
    names: dict[str, Any] = {"OPTIONS": OPTIONS, "__name__": "__main__"}
    if not ours:
        text = text.replace("import torch\n", "", 1)
        names["torch"] = _Torch()
    out.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), kind, str(out), str(STEPS), resume])
        exec(compile(text, str(SCRIPT), "exec"), names)
    if ours:
        overspill.unwrap(names["trained"])
    return list(names["losses"])


def tensors(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """All tensors of all files in a folder, by file."""
    return {
        str(file.relative_to(folder)): load_file(file)
        for file in sorted(folder.rglob("*.safetensors"))
    }


@pytest.mark.parametrize(
    "kind", [k if k in DAILY else pytest.param(k, marks=pytest.mark.soak) for k in KINDS]
)
def test_losses_and_files_are_those_of_the_plain_script(kind: str, tmp_path: Path) -> None:
    expected = run(kind, tmp_path / "plain", ours=False)
    assert run(kind, tmp_path / "ours", ours=True) == expected
    theirs, mine = tensors(tmp_path / "plain"), tensors(tmp_path / "ours")
    assert theirs.keys() == mine.keys() and len(theirs) >= 3
    for name, found in theirs.items():
        assert found.keys() == mine[name].keys()
        assert all(torch.equal(value, mine[name][key]) for key, value in found.items()), name
    if NAME:  # the plain run's optimizer, which is on the CPU there, is not saved with its rate
        return
    checkpoint = "checkpoint-2"
    again = run(kind, tmp_path / "again", ours=False, resume=str(tmp_path / "plain" / checkpoint))
    resumed = run(kind, tmp_path / "resumed", ours=True, resume=str(tmp_path / "ours" / checkpoint))
    crossed = run(
        kind, tmp_path / "crossed", ours=True, resume=str(tmp_path / "plain" / checkpoint)
    )
    assert resumed == again and crossed == again
