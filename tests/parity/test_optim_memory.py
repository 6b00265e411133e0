"""A step of the CPU optimizers needs no room of its own: at most 1 MB per thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from overspill.optim import kernels
from tests.devices import about_cpu
from tests.patience import WAIT_S

pytestmark = about_cpu

STEP = """
import sys, torch
import overspill.optim as optim
from pathlib import Path


def memory(name):
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0])

torch.set_num_threads(1)
optim.set_threads(2)
kind, dtype, master, moments = sys.argv[1:5]
dtype = getattr(torch, dtype)
values = [torch.full(shape, 0.01, dtype=dtype) for shape in ((5000, 2001), (77,))]
params = [torch.nn.Parameter(value) for value in values]
optimizer = getattr(optim, kind)(params, lr=1e-3, master=None if master == "none" else master,
                                 moments=moments)
for param in params:
    param.grad = torch.full_like(param, 0.5)
for _ in range(3):
    optimizer.step(grad_scale=0.5)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
optimizer.step(grad_scale=0.5)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(kernels.NATIVE is None, reason="needs the native extension")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(("AdamW", "bfloat16", "split", "fp32"), marks=pytest.mark.soak),
        ("AdamW", "bfloat16", "split", "int8"),
        pytest.param(("AdamW", "float32", "none", "bf16"), marks=pytest.mark.soak),
        ("Lion", "float16", "fp32", "int8"),
    ],
    ids="-".join,
)
def test_a_step_allocates_next_to_nothing(formats: tuple[str, ...]) -> None:
    told = subprocess.run(
        [sys.executable, "-c", STEP, *formats], capture_output=True, text=True, timeout=WAIT_S,
        check=True,
    )  # fmt: skip
    peak_kib = int(told.stdout)
    assert peak_kib <= 2 * 1024, f"a step of 10 M parameters took {peak_kib} KiB more"
