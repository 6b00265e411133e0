"""Other threads and signal handlers: told that they come at a wrong time, and nothing is harmed."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.errors import OffloadError
from overspill.movement.uninterruptible_thread import UninterruptibleThread
from tests.devices import CPU, SIM, forget_races, normal, plainly
from tests.models import TinyLM, adamw, batch, train, weights
from tests.parity.test_readers import PLACES
from tests.patience import WAIT_S

USES: dict[str, Callable[[Any, Any], object]] = {
    "read": lambda model, optimizer: [p.norm().item() for p in model.parameters()],
    "state": lambda model, optimizer: model.state_dict(),
    "moments": lambda model, optimizer: optimizer.state_dict(),
    "commit": lambda model, optimizer: optimizer.commit(),
    "rollback": lambda model, optimizer: optimizer.rollback(),
}


def wrapped(folder: Path, place: str) -> tuple[TinyLM, Any]:
    """The same each time."""
    folder.mkdir()
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = overspill.wrap(
        model, adamw(model), nvme=folder, rates=overspill.Rates(), **PLACES[place]
    )
    return model, optimizer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("use", USES)
def test_another_thread_is_told(use: str, place: str, tmp_path: Path) -> None:
    ends: list[dict[str, torch.Tensor]] = []
    said: set[str] = set()
    for number in range(2):
        model, optimizer = wrapped(tmp_path / str(number), place)
        with optimizer:
            over = threading.Event()

            def disturb(model: Any = model, optimizer: Any = optimizer, over: Any = over) -> None:
                while not over.wait(0.002):
                    try:
                        USES[use](model, optimizer)
                        said.add("nothing")
                    except OffloadError as error:
                        said.add(str(error).split(" uses ")[-1])

            thread = threading.Thread(target=disturb)
            if number:
                thread.start()
            train(model, optimizer, 6)
            over.set()
            if number:
                thread.join()
            ends.append(weights(model))
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name
    # Resident weights that show are an ordinary tensor: whoever reads them alone is not seen.
    forget_races()
    assert any("the thread that trains" in each for each in said), said
    assert "nothing" not in said or use not in ("commit", "rollback")


def test_a_thread_may_train_that_did_not_wrap(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = overspill.wrap(
        model, adamw(model), nvme=tmp_path, rates=overspill.Rates(), **PLACES["streamed"]
    )
    raised: list[BaseException] = []

    def run() -> None:
        try:
            train(model, optimizer, 3)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not raised and optimizer.step_count == 3
    optimizer.close()


@pytest.mark.parametrize("use", [*USES, "unwrap"])
def test_after_a_thread_has_ended_any_other_goes_on(use: str, tmp_path: Path) -> None:
    """One evaluates the model and is joined: nobody uses it any more."""
    torch.manual_seed(0)
    model = TinyLM()
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, rates=overspill.Rates(), **PLACES["streamed"]
    ) as optimizer:
        train(model, optimizer, 1)
        thread = threading.Thread(target=model, args=batch(9))
        thread.start()
        thread.join()
        if use == "unwrap":
            kept = overspill.unwrap(model).state_dict()
        else:
            USES[use](model, optimizer)
            kept = weights(model)
        torch.manual_seed(0)
        plain = TinyLM()
        train(plain, adamw(plain), 1)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(kept[name].to(value.device), value)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["memory", "device"])
def test_a_handler_that_commits_is_served_or_told(place: str, tmp_path: Path) -> None:
    """At any instant of any step; nothing hangs, and what is resumed is whole."""
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = overspill.wrap(
        model, adamw(model), nvme=tmp_path, rates=overspill.Rates(), **PLACES[place]
    )
    calls = [0]

    def handler(*_: Any) -> None:
        calls[0] += 1
        try:
            optimizer.commit()
        except OffloadError as error:
            assert "not finite" not in str(error)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.007)
        train(model, optimizer, 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls[0] > 20 and optimizer.step_count == 60
    wanted = weights(model)
    optimizer.close()
    again = TinyLM()
    optimizer, _ = overspill.resume(
        again, tmp_path, adamw(again), device=CPU, host_memory="64MiB", rates=overspill.Rates()
    )
    with optimizer:
        assert optimizer.step_count == 60
        for name, value in weights(again).items():
            assert torch.equal(value, wanted[name]), name


def test_an_interrupted_read_of_weights_harms_nothing(tmp_path: Path) -> None:
    """Ctrl-C while ``state_dict`` reads from disk, at many instants: training goes on, exact."""

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    ends, stopped = [], 0
    before = signal.signal(signal.SIGALRM, handler)
    # One that comes amid a callback of the collector's (hypothesis has one) is lost, and pytest
    # keeps its frames, which have weights.
    gc.disable()
    try:
        for number in range(2):
            model, optimizer = wrapped(tmp_path / str(number), "streamed")
            with optimizer:
                train(model, optimizer, 2)
                for tenth_ms in range(1, 61) if number else ():
                    try:
                        try:
                            signal.setitimer(signal.ITIMER_REAL, tenth_ms * 1e-4)
                            for _ in range(3):
                                model.state_dict()
                                optimizer.state_dict()
                        finally:
                            signal.setitimer(signal.ITIMER_REAL, 0)
                    except KeyboardInterrupt:
                        stopped += 1
                train(model, optimizer, 2)
                ends.append(weights(model))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert torch.is_grad_enabled()
    assert stopped > 20
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name


def test_an_optimizer_collected_on_a_thread_of_its_own_closes(tmp_path: Path) -> None:
    """The thread cannot wait for itself; the files go all the same, and nothing hangs."""
    model = TinyLM()
    optimizer = overspill.wrap(
        model, adamw(model), nvme=tmp_path, rates=overspill.Rates(), durable=False,
        **PLACES["streamed"],
    )  # fmt: skip
    train(model, optimizer, 2)
    closing = threading.Thread(target=optimizer.close, name="overspill-machine")
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive()

    def gone() -> None:
        left = [t.name for t in threading.enumerate() if "overspill" in t.name]
        assert not left and not any(tmp_path.iterdir())

    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        with contextlib.suppress(AssertionError):
            return gone()
        time.sleep(0.01)
    gone()


def test_work_is_over_when_its_caller_was_interrupted() -> None:
    runner, done = UninterruptibleThread("overspill-test"), []

    def slow() -> None:
        time.sleep(0.3)
        done.append(True)

    def handler(*_: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(1, 4):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(InterruptedError):
                runner.run(slow)
            assert len(done) == number
        with pytest.raises(ZeroDivisionError):
            runner.run(lambda: 1 // 0)
        assert runner.run(lambda: 7) == 7
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        runner.close()


class Branches(torch.nn.Module):
    """Runs one chain of layers in a thread of a pool, and the other beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (
            torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(6)
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(chain: Any, x: torch.Tensor) -> torch.Tensor:
            for layer in chain:
                x = layer(x)
            return x

        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(run, self.other, x)
            return run(self.one, x) + beside.result()


@pytest.mark.parametrize("update", ["step", "next_forward"])
@pytest.mark.parametrize(
    "options",
    [
        {"device": CPU, "host_memory": "64KiB"},
        {"device": SIM, "device_memory": "48KiB", "host_memory": "4MiB"},
    ],
)
def test_modules_of_one_forward_may_run_in_threads(
    options: dict[str, Any], update: Any, tmp_path: Path
) -> None:
    model, plain = Branches(), Branches()
    theirs = plainly(overspill.optim.SGD, plain.parameters(), lr=0.1)
    with overspill.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nvme=tmp_path, update=update,
        rates=overspill.Rates(), **options,
    ) as optimizer:  # fmt: skip
        device = optimizer._engine.runtime.accelerator.device
        plain.to(device)
        for number in range(6):
            x = normal(number, 4, 32).to(device)
            for m, o in ((plain, theirs), (model, optimizer)):
                m(x).square().sum().backward()
                o.step()
                o.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
