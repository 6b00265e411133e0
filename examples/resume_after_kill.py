"""A run that is killed, and goes on where it was: every step is a checkpoint.

    python examples/resume_after_kill.py OUT [--steps 12]

A process of its own trains and is killed without a word (SIGKILL) after some steps; this one then
resumes from the store, and ends with the very weights of a run that nobody has killed.  In a
script of yours the two lines that matter are ``overspill.wrap(..., nvme=DIR)``, and after a crash
``overspill.resume(model, DIR, optimizer)``.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import torch
from torch import nn

import overspill


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: overspill.OffloadedOptimizer, until: int) -> None:
    for step in range(optimizer.step_count, until):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.commit()  # every step is one anyway; this waits for it
        print(f"step {step + 1}", flush=True)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
given = parser.parse_args()
if given.steps < 2:
    parser.error("a run that is killed in the middle has at least 2 steps")
store, other = (pathlib.Path(given.out) / name for name in ("store", "other"))
if not given.child:
    for folder in (store, other):
        shutil.rmtree(folder, ignore_errors=True)  # of a run of this script before
        folder.mkdir(parents=True)

if given.child:
    model, inner = model_and_optimizer()
    train(model, overspill.wrap(model, inner, host_memory="16MiB", nvme=store), given.steps)
    raise SystemExit

words = [sys.executable, __file__, given.out, "--steps", str(given.steps), "--child"]
child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
assert child.stdout is not None
for line in child.stdout:
    print(line, end="")
    if line.strip() == f"step {given.steps // 2}":
        os.kill(child.pid, signal.SIGKILL)
        break
assert child.wait() == -signal.SIGKILL
print("killed")

model, inner = model_and_optimizer()
optimizer, _ = overspill.resume(model, store, inner)
print(f"resumed at step {optimizer.step_count}")
train(model, optimizer, given.steps)
resumed = overspill.unwrap(model).state_dict()
optimizer.close()

model, inner = model_and_optimizer()
whole = overspill.wrap(model, inner, host_memory="16MiB", nvme=other)
train(model, whole, given.steps)
expected = overspill.unwrap(model).state_dict()
whole.close()
same = all(torch.equal(resumed[name], value) for name, value in expected.items())
print("the very weights of a run that nobody has killed" if same else "the weights DIFFER")
raise SystemExit(not same)
