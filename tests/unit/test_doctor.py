"""``overspill doctor``: what it says of machines that are in order, slow and broken."""

from __future__ import annotations

import errno
import json
import os
import resource
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from overspill.cli.app import app
from overspill.doctor import device, disks, host, packages
from overspill.doctor.finding import Finding, State
from overspill.facts.rates import Rates
from overspill.measure import calibration

KNOWN = {
    "Python", "torch", "transformers", "safetensors", "matplotlib", "CuPy", "device",
    "host memory", "huge pages", "locked memory", "processors", "disk transfers",
}  # fmt: skip


def _doctor(*words: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *words])


def _mends(finding: Finding, state: State, remedy: str) -> None:
    assert finding.state is state and remedy in finding.remedy and finding.meaning


def test_it_says_what_there_is_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "NODES", tmp_path)  # whatever torch was built for
    told = _doctor("--nvme", str(tmp_path), "--json")
    assert told.exit_code == 0, told.output
    answer = json.loads(told.output)
    found = {each["about"]: each for each in answer["findings"]}
    assert answer["works"] and set(found) >= KNOWN
    assert found["torch"]["figures"] == {"version": version("torch")}
    assert found["host memory"]["figures"]["free_bytes"] > 0
    of_disk = [about for about in found if about.startswith(f"{tmp_path}:")]
    assert [about.rpartition(": ")[2] for about in of_disk] == [
        "file system", "direct I/O", "room", "rates", "wear",
    ]  # fmt: skip
    assert all(each["state"] in ("good", "note", "slow") for each in found.values())
    assert not list(tmp_path.iterdir())


def test_what_is_broken_is_the_exit_code(tmp_path: Path) -> None:
    told = _doctor("--nvme", str(tmp_path / "none"))
    assert told.exit_code == 1
    assert "BROKEN" in told.output and f"-> mkdir -p {tmp_path / 'none'}" in told.output
    assert told.output.splitlines()[-1].endswith("do not work")


def test_what_cannot_be_looked_at_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> Any:
        yield Finding("first", "there", State.GOOD, "so it is")
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device, "look", full)
    told = _doctor("--nvme", str(tmp_path), "--json")
    assert told.exit_code == 1
    found = {each["about"]: each for each in json.loads(told.output)["findings"]}
    assert found["first"]["state"] == "good" and "host memory" in found
    assert found["device"]["state"] == "broken" and "out of memory" in found["device"]["meaning"]


def test_what_is_no_directory_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.touch()
    (found,) = disks.look(file, "cpu")
    assert found.state is State.BROKEN and found.remedy == "name another one"
    (found,) = disks.look(tmp_path / "no folder", "cpu")
    assert found.remedy == f"mkdir -p '{tmp_path}/no folder'"


def test_rates_that_a_run_has_kept_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run's directories, and, of the link, by its device alone."""
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))
    kept = Rates(h2d_bytes_s=5e10, disk_read_bytes_s=3e9, disk_write_bytes_s=2e9)
    monkeypatch.setattr(calibration.machine_rates, "measure", lambda *_: kept)
    assert disks.rates(tmp_path, "cpu").found == "not measured yet"
    assert calibration.kept_rates(None, "cpu") is None
    calibration.calibrate([tmp_path, tmp_path], "cpu")
    assert disks.rates(tmp_path, "cpu").found == "not measured yet", "it was two of them"
    found = disks.rates(tmp_path, "cpu", [tmp_path, tmp_path])
    assert found.state is State.GOOD and found.figures == {
        "read_bytes_s": 3e9, "write_bytes_s": 2e9,
    }  # fmt: skip
    assert calibration.kept_rates(None, "cpu") == kept
    assert calibration.kept_rates(None, "sim") is None


def test_a_directory_of_others_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(disks.tempfile, "NamedTemporaryFile", refused)
    found = disks.direct(tmp_path)
    _mends(found, State.BROKEN, "chown")
    assert "Permission denied" in found.found


def test_a_file_system_without_direct_io_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(disks.os, "preadv", refused)
    _mends(disks.direct(tmp_path), State.SLOW, "ext4")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("ext4", State.GOOD), ("beegfs", State.NOTE), ("tmpfs", State.SLOW), ("nfs4", State.SLOW),
        ("fuse.sshfs", State.SLOW), ("overlay", State.SLOW),
    ],
)  # fmt: skip
def test_file_systems(
    kind: str, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "_mount", lambda _: ("/x", kind, "/dev/x"))
    assert disks.file_system(tmp_path).state is state


def test_a_worn_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "smartctl"
    tool.write_text(
        '#!/bin/sh\necho \'{"nvme_smart_health_information_log": {"percentage_used": 93}}\'\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(disks, "_mount", lambda _: ("/x", "ext4", "/dev/nvme0n1p1"))
    found = disks.endurance(tmp_path)
    _mends(found, State.NOTE, "use another one")
    assert found.figures == {"used_percent": 93}
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(disks, "SMART_S", 0.2)
    assert disks.endurance(tmp_path).found == "not known"


def test_huge_pages_that_are_off_are_slow(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    _mends(host.huge_pages(setting), State.SLOW, f"sudo tee {setting}")
    setting.write_text("always [madvise] never\n")
    assert host.huge_pages(setting).state is State.GOOD
    assert host.huge_pages(tmp_path / "none").state is State.NOTE


def test_little_locked_memory_is_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr(host, "may_lock_anything", lambda: False)
    _mends(host.locked_memory(), State.SLOW, "ulimit -l unlimited")
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert host.locked_memory().state is State.GOOD
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    monkeypatch.undo()
    assert host.may_lock_anything(status)
    status.write_text("CapEff:\t0000000000000000\n")
    assert not host.may_lock_anything(status)


@pytest.mark.parametrize(("isa", "state"), [("avx2", State.GOOD), ("scalar", State.SLOW),
                                            ("torch", State.SLOW)])  # fmt: skip
def test_instructions(isa: str, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "native_isa", lambda: isa)
    assert host.processors().state is state


@pytest.mark.parametrize(
    ("backend", "state"),
    [("uring", State.GOOD), ("threads", State.NOTE), ("aiofiles", State.SLOW)],
)
def test_backends(backend: str, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "choose", lambda _: (backend, "so it is"))
    found = host.transfers()
    assert found.state is state and (state is State.GOOD or "so it is" in found.found)


def test_a_gpu_that_torch_does_not_see_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.missing(tmp_path).state is State.NOTE
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    _mends(device.missing(tmp_path), State.BROKEN, "with CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _mends(device.missing(tmp_path), State.BROKEN, "--gpus all")


def test_a_link_with_lanes_missing_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kept_rates", lambda *_: None)
    for name, text in (
        ("current_link_width", "8"), ("max_link_width", "16"), ("max_link_speed", "16.0 GT/s PCIe"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text + "\n")
    found = device.link(tmp_path, "cuda")
    _mends(found, State.SLOW, "lspci")
    assert found.figures is not None and found.figures["bytes_s"] == pytest.approx(
        15.75e9, rel=1e-3
    )
    (tmp_path / "current_link_width").write_text("16\n")
    assert device.link(tmp_path, "cuda").state is State.GOOD
    assert device.link(tmp_path / "none", "cuda").state is State.NOTE


@pytest.mark.parametrize(
    ("lists", "node", "allowed", "state"),
    [
        (["0-3,8-11", "4-7,12-15"], 1, {4, 5, 12}, State.GOOD),
        (["0-3,8-11", "4-7,12-15"], 1, {0, 4}, State.SLOW),
        (["0-3", "4-7"], 0, {4, 5}, State.SLOW),
        (["0-7", ""], 1, {0}, None),  # memory without processors
        (["0-7"], 0, {0}, None),
        (["0-3", "4-7"], -1, {0}, None),  # as virtual machines say
        (["0-3", "x"], 0, {0}, None),
    ],
)
def test_the_numa_node_of_the_device(
    lists: list[str], node: int, allowed: set[int], state: State | None, tmp_path: Path
) -> None:
    for number, cpus in enumerate(lists):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}/cpulist").write_text(f"{cpus}\n")
    (tmp_path / "numa_node").write_text(f"{node}\n")
    found = list(device.memory_node(tmp_path, tmp_path, allowed))
    assert [each.state for each in found] == ([] if state is None else [state])
    if state is State.SLOW:
        _mends(found[0], State.SLOW, f"numactl --cpunodebind={node} --membind={node} ")
    assert not list(device.memory_node(tmp_path / "none", tmp_path, allowed))


def test_the_driver_is_read(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.95.05  Release Build\n")
    assert device.driver(file).found.startswith("580.95.05, ")
    assert device.driver(tmp_path / "none").found.startswith("not known, ")


def test_releases_that_nobody_has_tried_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages.torch_release("2.13.1+cu130").state is State.GOOD
    assert packages.torch_release("3.0.0").state is State.NOTE
    monkeypatch.setattr(packages, "_installed", lambda _: None)
    _mends(packages.cupy(gpu=True), State.SLOW, "overspill[cuda]")
    assert packages.cupy(gpu=False).state is State.NOTE


def test_a_full_disk_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((0, State.BROKEN), (1 << 30, State.NOTE), (1 << 40, State.GOOD)):
        usage = disks.shutil._ntuple_diskusage(1 << 41, (1 << 41) - free, free)
        monkeypatch.setattr(disks.shutil, "disk_usage", lambda _, usage=usage: usage)
        assert disks.room(tmp_path).state is state


def test_memory_does_not_wear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_mount", lambda _: ("/dev/shm", "tmpfs", "tmpfs"))
    assert disks.endurance(tmp_path).state is State.GOOD
