"""Export and inspection beside a run that goes on: they succeed, and the run loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overspill.durable.export import Exported, export_store
from overspill.durable.inspect import StoreMovedError, inspect_store, read_pinned
from overspill.io_engine.committed import find_store
from overspill.io_engine.pins import MOST_READS, PIN_NAME, CommitPin, pin_of
from tests.devices import about_files
from tests.durable.beside_cases import LAYERS
from tests.patience import WAIT_S

pytestmark = about_files
ROOT = Path(__file__).parents[2]


@contextmanager
def fast_run(store: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A run that takes steps until the block ends, and then commits the last one."""
    store.mkdir()
    words = [sys.executable, "-m", "tests.durable.beside_cases", str(store), json.dumps(options)]
    run = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
    )
    assert run.stdin is not None and run.stdout is not None
    try:
        assert run.stdout.readline() == "steps\n"
        yield run
        run.stdin.close()
        last = int(run.stdout.readline())
        assert run.wait(WAIT_S) == 0
        assert find_store(store).last().step == last, "the last step is committed"
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


def check(out: Path, done: Exported) -> None:
    """All weights and moments are those of one step."""
    weights = load_file(out / "model.safetensors")
    values = {value for t in weights.values() for value in t.unique().tolist()}
    assert values == {-float(done.step)}, (done.step, values)
    state = torch.load(out / "optimizer.pt", weights_only=True)["state"]
    assert len(weights) == len(state) == LAYERS
    assert all((each["momentum_buffer"] == 1.0).all() for each in state.values())


@pytest.mark.parametrize(
    "options",
    [{}, {"update": "backward"}, {"update": "step", "checksum": False}, {"commit_every": 3}],
    ids=["next_forward", "backward", "without checksums", "every third"],
)
def test_exports_beside_a_fast_run(tmp_path: Path, options: dict[str, Any]) -> None:
    """Six of six, each of one step, and later ones of later steps."""
    steps = []
    with fast_run(tmp_path / "store", **options):
        for number in range(6):
            done = export_store(tmp_path / "store", tmp_path / f"out{number}")
            check(tmp_path / f"out{number}", done)
            found = inspect_store(tmp_path / "store")
            assert not found.wrong and found.verified_bytes > 1 << 20
            steps.append(done.step)
    assert steps == sorted(steps) and steps[0] < steps[-1], "commits go on in between"
    assert not (tmp_path / "store" / PIN_NAME).exists()


def test_the_command_beside_a_fast_run(tmp_path: Path) -> None:
    with fast_run(tmp_path / "store"):
        for number in range(3):
            words = ["export", str(tmp_path / "store"), str(tmp_path / f"out{number}")]
            done = subprocess.run(
                [sys.executable, "-m", "overspill", *words], capture_output=True, text=True,
                check=False, cwd=ROOT,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            step = int(done.stdout.split("step ")[-1])
            check(tmp_path / f"out{number}", Exported(step, {}))


def test_a_run_that_calls_commit_is_exported_when_it_does_so_seldom(tmp_path: Path) -> None:
    """``commit()`` is durable when it returns, whoever reads: the export begins anew."""
    with fast_run(tmp_path / "store", calls=100, commit_every=10**6):
        check(tmp_path / "out", export_store(tmp_path / "store", tmp_path / "out"))


def test_a_reader_that_is_killed_holds_up_nothing(tmp_path: Path) -> None:
    with fast_run(tmp_path / "store"):
        code = "import sys; from pathlib import Path; from overspill.io_engine import pins\n"
        code += "pin = pins.CommitPin(Path(sys.argv[1])); print(pin.held, flush=True); input()"
        reader = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "store")], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert reader.stdout is not None and reader.stdin is not None
        assert reader.stdout.readline() == "True\n"
        store = tmp_path / "store"
        while find_store(store).last().number != (now := find_store(store).last().number):
            pass
        held = inspect_store(store, verify=False).commits[-1]
        reader.send_signal(signal.SIGKILL)
        reader.wait()
        reader.stdout.close()
        reader.stdin.close()
        while inspect_store(store, verify=False).commits[-1].step <= held.step:
            pass  # the next commit comes
        assert now <= held.number
    assert not (tmp_path / "store" / PIN_NAME).exists()


# -- the pin itself -------------------------------------------------------------------------------


def test_a_pin_holds_until_the_last_reader_ends(tmp_path: Path) -> None:
    assert pin_of(tmp_path) is None
    with CommitPin(tmp_path) as one:
        first = pin_of(tmp_path)
        assert one.held and first is not None
        two = CommitPin(tmp_path)
        assert two.held
    assert pin_of(tmp_path) == first
    two.close()
    two.close()
    assert pin_of(tmp_path) is None and not list(tmp_path.iterdir())
    with CommitPin(tmp_path):
        assert pin_of(tmp_path) not in (None, first)


def test_what_a_killed_reader_left_goes(tmp_path: Path) -> None:
    (tmp_path / PIN_NAME).write_text("")
    assert pin_of(tmp_path) is None and not list(tmp_path.iterdir())


def test_a_link_is_no_pin_and_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / PIN_NAME).symlink_to(tmp_path / "precious")
    assert pin_of(tmp_path) is None
    with CommitPin(tmp_path) as pin:
        assert not pin.held
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_directory_that_cannot_be_written_is_read_without_a_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fast_run(tmp_path / "store"):
        pass

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("overspill.io_engine.pins.os.open", refuse)
        assert not CommitPin(tmp_path / "store").held
    monkeypatch.setattr(CommitPin, "_take", refuse)
    check(tmp_path / "out", export_store(tmp_path / "store", tmp_path / "out"))


def test_a_store_that_moves_on_all_the_same_is_told(tmp_path: Path) -> None:
    with fast_run(tmp_path / "store"):
        pass
    tries = []

    def moved(store: Any) -> None:
        tries.append(pin_of(tmp_path / "store") is not None)
        raise StoreMovedError("on")

    with pytest.raises(StoreMovedError):
        read_pinned(tmp_path / "store", moved)
    assert tries == [True] * MOST_READS
