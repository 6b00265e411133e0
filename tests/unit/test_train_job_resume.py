"""``overspill train --resume``: the losses that follow are those of a run that was not stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overspill.train.job import Job, run
from overspill.train.training_loop import StepRecord
from tests.unit.test_train_job import Quiet, small


class Stopped(Exception):
    """Ctrl-C, or worse."""


class Interrupted(Quiet):
    """Ends the run after its third step."""

    def step(self, record: StepRecord, memory: Any) -> None:
        super().step(record, memory)
        if record.step == 3:
            raise Stopped


def interrupted(tmp_path: Path, **changes: Any) -> Job:
    """The job that goes on with one that was stopped."""
    job = small(tmp_path, **{"steps": 8, "warmup": 5, **changes})
    with pytest.raises(Stopped):
        run(job, Interrupted())
    offload = dict(job.offload)
    return replace(job, resume=(Path(offload.pop("nvme")),), offload=offload)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2},
        {"offload": {"precision": "bf16", "update": "backward"}},
        {"offload": {"precision": "fp16"}},
    ],
    ids=["accumulate", "bf16", "fp16"],
)
def test_the_losses_are_those_of_a_run_that_was_not_stopped(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = run(small(tmp_path, steps=8, warmup=5, **changes), Quiet())
    again = run(interrupted(tmp_path, **changes), Quiet())
    assert [r.step for r in again.records] == [4, 5, 6, 7, 8]
    assert [r.loss for r in again.records] == [r.loss for r in whole.records[3:]]
    assert again.position == whole.position


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 9}, "begun with seed 0, not 9; give the same"),
        ({"seq": 16}, "begun with seq 32, not 16"),
        ({"warmup": 1}, "begun with warmup 5, not 1"),
        ({"steps": 2}, "has done 3 steps already, and steps=2; ask for more steps than it"),
    ],
)
def test_another_job_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """And the store is as it was: the job itself goes on."""
    job = interrupted(tmp_path)
    with pytest.raises(ValueError, match=message):
        run(replace(job, **changes), Quiet())
    assert run(job, Quiet()).records[0].step == 4


def test_no_comparison_from_the_middle() -> None:
    with pytest.raises(ValueError, match="leave it out with resume"):
        Job(resume=(Path("store"),), compare=True)
