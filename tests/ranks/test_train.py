"""``torchrun -m overspill train``: the losses of one rank; one readable cause of a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

JOB = ["--model", "gpt2-1m", "--seq", "64", "--device", "cpu", "--host-memory", "1GiB"]


def overspill(
    ranks: int, out: Path, *more: object, site: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``site``: a folder with a ``sitecustomize.py``."""
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [*start, "overspill", "train", *JOB, "--out", out, *more]
    return subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", **({} if site is None else {
            "PYTHONPATH": str(site)})},
    )  # fmt: skip


def run(ranks: int, out: Path, *more: object, site: Path | None = None) -> dict[str, Any]:
    done = overspill(ranks, out, *more, site=site)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def losses(found: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in found["steps"]]


@pytest.mark.soak  # each rank imports transformers
def test_two_ranks_train_what_one_does_and_it_goes_on_alone(tmp_path: Path) -> None:
    """In halves of the same batches; a store of two is taken up by one."""
    store, later = tmp_path / "store", tmp_path / "later"
    store.mkdir()
    later.mkdir()
    two = run(2, tmp_path / "two", "--steps", 3, "--batch", 2, "--nvme", store)
    one = run(1, tmp_path / "one", "--steps", 5, "--batch", 4)
    assert two["ranks"] == 2
    assert losses(two) == pytest.approx(losses(one)[:3], rel=1e-5)
    names = load_file(tmp_path / "one" / "model.safetensors").keys()
    assert load_file(tmp_path / "two" / "model.safetensors").keys() == names
    on = run(1, tmp_path / "on", "--steps", 5, "--batch", 4, "--resume", store, "--nvme", later)
    assert losses(on) == pytest.approx(losses(one)[3:], rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("spread", ["fsdp", "ddp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_in_both_ways(spread: str, ranks: int, tmp_path: Path) -> None:
    """From random weights, and from a folder; with micro-batches."""
    steps = ["--steps", 4, "--accumulate", 2, "--max-grad-norm", "0.5", "--recompute"]
    one = run(1, tmp_path / "one", *steps, "--batch", 4)
    more = ["--batch", 4 // ranks, "--spread", spread]
    assert losses(run(ranks, tmp_path / "two", *steps, *more)) == pytest.approx(
        losses(one), rel=1e-5
    )
    steps += ["--model", tmp_path / "one"]
    one = run(1, tmp_path / "tuned", *steps, "--batch", 4)
    assert losses(run(ranks, tmp_path / "tuned2", *steps, *more)) == pytest.approx(
        losses(one), rel=1e-5
    )


@pytest.mark.soak
@pytest.mark.parametrize("spread", ["fsdp", "ddp"])
def test_losses_in_chunks(spread: str, tmp_path: Path) -> None:
    """The head is sharded, or its gradients are reduced."""
    (tmp_path / "sitecustomize.py").write_text(
        "from overspill.logits import rows\nrows.CHUNK_BYTES, rows.LEAST_TOKENS = 65536, 16\n"
    )
    steps = ["--steps", 3]
    plain = losses(run(1, tmp_path / "plain", *steps, "--batch", 4))
    one = losses(run(1, tmp_path / "one", *steps, "--batch", 4, site=tmp_path))
    more = ["--batch", 2, "--spread", spread]
    two = losses(run(2, tmp_path / "two", *steps, *more, site=tmp_path))
    assert two == pytest.approx(plain, rel=1e-5) and one == pytest.approx(plain, rel=1e-5)
    assert one != plain  # or there were no chunks


@pytest.mark.soak
def test_a_rank_that_fails_is_the_one_that_says_why(tmp_path: Path) -> None:
    """The disk of one rank is full: all end, and only one line names a cause."""
    (tmp_path / "store").mkdir()
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import os, sys\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import builtins\n"
        "    real = builtins.__import__\n"
        "    def late(name, *args, **kwargs):\n"
        "        module = real(name, *args, **kwargs)\n"
        "        loop = sys.modules.get('overspill.train.training_loop')\n"
        "        if loop is not None and not hasattr(loop, 'broken') and hasattr(loop, 'train'):\n"
        "            loop.broken, steps = True, [0]\n"
        "            gradients = loop._gradients\n"
        "            def fails(*a):\n"
        "                steps[0] += 1\n"
        "                if steps[0] == 3:\n"
        "                    raise OSError('no space left on device')\n"
        "                return gradients(*a)\n"
        "            loop._gradients = fails\n"
        "        return module\n"
        "    builtins.__import__ = late\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
        "overspill", "train", *JOB, "--steps", "9", "--batch", "2", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "error:" in line and "rank" in line]
    causes = [line for line in said if "another rank" not in line]
    assert causes == ["rank 1: error: no space left on device"], done.stderr
