"""Options: what is read, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from overspill.config import OffloadConfig, Size, parse_size
from overspill.facts.tier import Tier


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (123, Size(123)),
        ("10GiB", Size(10 * 2**30)),
        ("1.5 MB", Size(1_500_000)),
        ("64kib", Size(65536)),
        ("80%", Size(share=0.8)),
        ("auto", Size()),
        (0, Size(0)),
    ],
)
def test_sizes(text: int | str, size: Size) -> None:
    assert parse_size(text, "host_memory") == size


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("10GX", "unknown unit 'GX'"),
        ("-3GiB", "cannot read"),
        (-1, ">= 0"),
        (float("nan"), ">= 0"),
        (float("inf"), ">= 0"),
        ("", "cannot read"),
        ("120%", "up to 100%"),
        ("nan", "cannot read"),
        (f"1{'0' * 400}GiB", "finite number of bytes"),
    ],
)
def test_bad_sizes(bad: int | str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_size(bad, "host_memory")
    assert "host_memory" in str(caught.value)


def test_sizes_of_another_type() -> None:
    with pytest.raises(TypeError):
        parse_size(None, "host_memory")  # type: ignore[arg-type]


def test_shares_and_auto_resolve() -> None:
    assert Size(share=0.5).resolve(1000, 100) == 500
    assert Size().resolve(1000, 100) == 900
    assert Size().resolve(50, 100) == 0
    assert Size(7).resolve(1000, 100) == 7


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"host_memroy": 1}, TypeError, "did you mean 'host_memory'"),
        ({"zzz": 1}, TypeError, "unknown option 'zzz'"),
        ({"precision": "fp8"}, ValueError, "precision must be one of"),
        ({"accumulate": 0}, ValueError, "accumulate"),
        ({"accumulate": 1.5}, ValueError, "accumulate"),
        ({"prefetch_depth": -1}, ValueError, "prefetch_depth"),
        ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm"),
        ({"max_grad_norm": [1.0]}, TypeError, "max_grad_norm must be a number"),
        ({"max_grad_norm": 1j}, TypeError, "max_grad_norm must be a number"),
        ({"accumulate": 10**6}, ValueError, "accumulate must be at most 10000"),
        ({"max_grad_norm": 1.0, "update": "backward"}, ValueError, "global norm"),
        ({"device": "cpu", "device_memory": "1GiB"}, ValueError, "one memory tier"),
        ({"units": "block"}, TypeError, "list of names"),
        ({"nvme": []}, ValueError, "empty list"),
        ({"init": 3}, TypeError, "callable"),
        ({"on_nonfinite": "rollback"}, ValueError, "goes back to the last commit; pass nvme="),
        ({"rates": 3}, TypeError, "overspill.Rates"),
        ({"commit_every": 5}, ValueError, "belong to a durable store; pass nvme="),
        ({"extra": dict}, ValueError, "belong to a durable store"),
        ({"moments": "int4"}, ValueError, "moments must be one of"),
        ({"leave": "10%"}, ValueError, "leave must be bytes or a size such as '4GiB', got '10%'"),
        ({"leave": "auto"}, ValueError, "leave must be bytes or a size"),
        ({"leave": -1}, ValueError, "leave must be a whole number of bytes"),
        ({"leave": {"gpu": 1}}, ValueError, "leave takes the keys 'device' and 'host' here"),
        ({"leave": {"device": 1}, "device": "cpu"}, ValueError, "leave takes the keys 'host' here"),
        ({"leave": 1, "device": "cpu", "host_memory": 9}, ValueError, "host_memory is given in by"),
        ({"leave": 1, "device_memory": 9, "host_memory": 9}, ValueError, "device_memory is given"),
        ({"leave": {"host": 1}, "host_memory": "9GiB"}, ValueError, "leave: host_memory is given"),
    ],
)
def test_refusals(options: dict[str, object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        OffloadConfig.from_options(options)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, (0, 0)),
        ({"leave": "4KiB"}, (4096, 4096)),
        ({"leave": {"host": 7}}, (0, 7)),
        ({"leave": {"device": "1KiB", "host": 7}}, (1024, 7)),
        ({"leave": {"device": "1KiB"}, "host_memory": 9}, (1024, 0)),
        ({"leave": 7, "host_memory": 9}, (7, 7)),  # of the device's budget alone
        ({"leave": 7, "device_memory": "50%"}, (7, 7)),
    ],
)
def test_memory_left_to_others(options: dict[str, object], left: tuple[int, int]) -> None:
    config = OffloadConfig.from_options(options)
    assert (config.left_bytes("device"), config.left_bytes("host")) == left


def test_defaults_and_lists() -> None:
    config = OffloadConfig.from_options({"nvme": "/x"})
    assert config.nvme == (Path("/x"),)
    assert config.durable and config.checksum and config.commit_every == 1
    assert OffloadConfig.from_options({"nvme": ["/x", "/y"]}).nvme == (Path("/x"), Path("/y"))


def test_tiers_are_their_names() -> None:
    table = {Tier.HOST: 1}
    assert table["host"] == 1 and Tier("nvme") is Tier.NVME  # type: ignore[index]
