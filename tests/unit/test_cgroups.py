"""What limits host memory and processors: control groups of versions 1 and 2, the process's own and
its ancestors, and limits on allocated memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill.doctor import host
from overspill.doctor.finding import State
from overspill.optim import cores
from overspill.optim.cgroups import SYSTEM, cpu_quota, memory_limits
from overspill.planning import budgets
from overspill.planning.budgets import free_host_bytes, total_host_bytes

GIB = 1 << 30
NEVER = 9223372036854771712  # how version 1 writes "no limit"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_MOUNTS = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


class Tree:
    """A root directory with a ``proc`` and control groups of a process that is not this one."""

    def __init__(self, root: Path, groups: str, mounts: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", mounts)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, **values: object) -> None:
        """Write the files of a version 2 group: ``memory_max=...`` is ``memory.max``."""
        for name, value in values.items():
            self.write(f"sys/fs/cgroup/{group}/{name.replace('_', '.', 1)}", f"{value}\n")

    def v1(self, group: str, limit: int, used: int, **stat: int) -> None:
        """Write the memory files of a version 1 group."""
        at = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{at}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{at}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{at}/memory.use_hierarchy", "1\n")
        lines = "".join(f"{name} {value}\n" for name, value in stat.items())
        self.write(f"{at}/memory.stat", f"total_cache 0\n{lines}")

    def free_bytes(self) -> list[int]:
        return [limit.free_bytes for limit in memory_limits(self.root)]


def test_v2_limit_on_an_ancestor(tmp_path: Path) -> None:
    """SLURM and systemd slices set the limit on a group above the one that processes are in."""
    tree = Tree(tmp_path, "0::/slurm/job_7/step_0/task_0\n", V2_MOUNTS)
    tree.v2("", cpu_max="max 100000")
    tree.v2("slurm", memory_max="max", memory_current=20 * GIB)
    tree.v2("slurm/job_7", memory_max=3 * GIB // 2, memory_current=GIB // 2)
    tree.v2("slurm/job_7", cpu_max="250000 100000")
    tree.v2("slurm/job_7/step_0", memory_max="max", memory_current=GIB // 4)
    tree.v2("slurm/job_7/step_0/task_0", memory_max=4 * GIB, memory_current=0, cpu_max="max 100000")
    limits = memory_limits(tmp_path)
    assert [limit.limit_bytes for limit in limits] == [4 * GIB, 3 * GIB // 2]
    assert limits[1].group == tmp_path / "sys/fs/cgroup/slurm/job_7"
    assert free_host_bytes(tmp_path) == GIB  # siblings have used the rest
    assert total_host_bytes(tmp_path) == 3 * GIB // 2
    assert cpu_quota(tmp_path) == 2.5


def test_v1_limit_on_an_ancestor(tmp_path: Path) -> None:
    groups = "9:name=systemd:/user\n4:memory:/user/session/run\n2:cpu,cpuacct:/user/run\n0::/x\n"
    tree = Tree(tmp_path, groups, V1_MOUNTS)
    tree.v1("", NEVER, 20 * GIB)
    tree.v1("user", 2 * GIB, GIB)
    tree.v1("user/session", NEVER, GIB)
    tree.v1("user/session/run", NEVER, GIB)
    cpu = "sys/fs/cgroup/cpu,cpuacct/user"
    for name, quota in ((cpu, 150000), (f"{cpu}/run", -1)):
        tree.write(f"{name}/cpu.cfs_quota_us", f"{quota}\n")
        tree.write(f"{name}/cpu.cfs_period_us", "100000\n")
    assert tree.free_bytes() == [GIB]
    assert free_host_bytes(tmp_path) == GIB
    assert cpu_quota(tmp_path) == 1.5


def test_v2_controllers_on_a_machine_that_mounts_both(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "2:cpu,cpuacct:/\n0::/a/b\n", V1_MOUNTS)
    tree.write("sys/fs/cgroup/unified/a/memory.max", f"{GIB}\n")
    tree.write("sys/fs/cgroup/unified/a/memory.current", "0\n")
    assert tree.free_bytes() == [GIB]
    assert cpu_quota(tmp_path) is None


def test_memory_high_limits_too(tmp_path: Path) -> None:
    """The kernel does not kill beyond it, but slows the process down until it hardly moves."""
    tree = Tree(tmp_path, "0::/a\n", V2_MOUNTS)
    tree.v2("a", memory_max=8 * GIB, memory_high=2 * GIB, memory_current=GIB)
    assert tree.free_bytes() == [GIB]


@pytest.mark.parametrize("version", [1, 2])
def test_file_cache_that_can_be_dropped_is_free(version: int, tmp_path: Path) -> None:
    """Reading a checkpoint fills the cache, which counts as used memory of the group."""
    if version == 2:
        tree = Tree(tmp_path, "0::/a\n", V2_MOUNTS)
        tree.v2("a", memory_max=8 * GIB, memory_current=7 * GIB)
        tree.v2("a", memory_stat=f"anon {GIB}\ninactive_file {4 * GIB}\nactive_file {2 * GIB}\n"
                f"file_mapped {GIB}")  # fmt: skip
    else:
        tree = Tree(tmp_path, "4:memory:/a\n", V1_MOUNTS)
        tree.v1(
            "a", 8 * GIB, 7 * GIB, inactive_file=0, total_inactive_file=4 * GIB,
            total_active_file=2 * GIB, total_mapped_file=GIB,
        )  # fmt: skip
    assert tree.free_bytes() == [6 * GIB]


def test_a_namespace_shows_its_own_root(tmp_path: Path) -> None:
    """In most containers."""
    tree = Tree(tmp_path, "0::/\n", V2_MOUNTS)
    tree.v2("", memory_max=GIB, memory_current=0, cpu_max="50000 100000")
    assert tree.free_bytes() == [GIB] and cpu_quota(tmp_path) == 0.5


def test_a_container_that_mounts_its_own_group(tmp_path: Path) -> None:
    """Version 1 without a namespace: the path is the host's, the mount shows only its end."""
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    tree = Tree(tmp_path, "4:memory:/docker/abc/inner\n", mounts)
    tree.v1("", 2 * GIB, GIB)
    tree.v1("inner", NEVER, 0)
    assert tree.free_bytes() == [GIB]


def test_a_group_outside_of_the_namespace(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/../other\n", V2_MOUNTS)
    tree.v2("", memory_max=GIB, memory_current=0)
    assert tree.free_bytes() == [GIB]


def test_a_parent_that_does_not_count_its_children(tmp_path: Path) -> None:
    """Version 1 on old kernels: ``memory.use_hierarchy`` is 0."""
    tree = Tree(tmp_path, "4:memory:/a/b\n", V1_MOUNTS)
    tree.v1("a", GIB, GIB)
    tree.v1("a/b", 2 * GIB, 0)
    tree.write("sys/fs/cgroup/memory/a/memory.use_hierarchy", "0\n")
    assert tree.free_bytes() == [2 * GIB]


def test_a_group_that_was_deleted(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a/b (deleted)\n", V2_MOUNTS)
    tree.v2("a", memory_max=GIB, memory_current=0)
    assert tree.free_bytes() == [GIB]


def test_a_mount_point_with_a_blank(tmp_path: Path) -> None:
    mounts = V2_MOUNTS.replace("/sys/fs/cgroup", "/control\\040groups")
    tree = Tree(tmp_path, "0::/a\n", mounts)
    tree.write("control groups/a/memory.max", f"{GIB}\n")
    tree.write("control groups/a/memory.current", "0\n")
    assert tree.free_bytes() == [GIB]


def test_the_mount_that_shows_most_ancestors_counts(tmp_path: Path) -> None:
    deeper = V2_MOUNTS.replace(" / /sys/fs/cgroup ", " /a/b /deeper ")
    tree = Tree(tmp_path, "0::/a/b\n", deeper + V2_MOUNTS)
    tree.v2("a", memory_max=GIB, memory_current=0)
    assert tree.free_bytes() == [GIB]


@pytest.mark.parametrize("text", ["", "garbage", "max", "0 0", "max 100000", "-1 100000"])
def test_without_a_limit_there_is_none(text: str, tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == [] and cpu_quota(tmp_path) is None
    tree = Tree(tmp_path, "0::/a\n", V2_MOUNTS)
    tree.v2("a", memory_max=text, memory_current=text, memory_stat=text, cpu_max=text)
    assert memory_limits(tmp_path) == [] and cpu_quota(tmp_path) is None
    assert free_host_bytes(tmp_path) > 0


def test_threads_keep_to_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, threads in ((0.5, 1), (1.5, 1), (2.0, 2)):
        monkeypatch.setattr(cores, "cpu_quota", lambda quota=quota: quota)
        monkeypatch.setattr(cores, "allowed_cpus", lambda: set(range(64)))
        assert cores.usable_cpus() == cores.quota_cpus() == threads
        assert cores.default_threads() <= threads
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    assert cores.usable_cpus() == 64


def test_doctor_names_the_group(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a/b\n", V2_MOUNTS)
    tree.v2("a", memory_max=GIB, memory_current=0)
    found = host.memory(tmp_path)
    group = f"control group {tmp_path / 'sys/fs/cgroup/a'}"
    assert found.state is State.SLOW and found.remedy.endswith(", or raise that limit")
    assert f"it is limited by {group}, not by the machine's memory" in found.meaning
    assert found.figures == {
        "total_bytes": GIB, "free_bytes": GIB, "limited_by": group, "limited_by_cgroup": True
    }  # fmt: skip


def test_ulimit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some batch systems limit the address space instead."""
    limits = {budgets.resource.RLIMIT_AS: 1 << 50, budgets.resource.RLIMIT_DATA: 1 << 34}
    monkeypatch.setattr(budgets.resource, "getrlimit", lambda kind: (limits[kind], 1 << 50))
    left = budgets.free_host_memory()
    assert 0 < left["ulimit -d"] < 1 << 34
    assert 1 << 49 < left["ulimit -v"] < 1 << 50


@pytest.mark.parametrize(("mode", "limited"), [("0", False), ("2", True)])
def test_strict_overcommit_counts(mode: str, limited: bool, tmp_path: Path) -> None:
    """Then memory that is allocated counts, and a budget is allocated in one piece."""
    tree = Tree(tmp_path, "", "")
    tree.write("proc/sys/vm/overcommit_memory", f"{mode}\n")
    tree.write("proc/meminfo", "MemTotal: 9 kB\nCommitLimit: 5000 kB\nCommitted_AS: 3000 kB\n")
    assert (free_host_bytes(tmp_path) == 2000 << 10) is limited


SCRIPT = """
import pathlib, sys
for group in sys.argv[1:]:
    pathlib.Path(group, "cgroup.procs").write_text("0")
import torch, overspill
from overspill.optim.cores import quota_cpus
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
with overspill.wrap(model, optimizer, device="cpu", rates=overspill.Rates()) as optimizer:
    for _ in range(2):
        model(torch.ones(4, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(optimizer.memory["host"].budget_bytes, quota_cpus())
"""


def nested(hierarchy: Path, values: dict[str, str]) -> Path | None:
    """Make a group with limits and a group inside of it; return the inner one, if that works."""
    outer = hierarchy / f"overspill-test-{os.getpid()}"
    if not (hierarchy / "cgroup.procs").exists():
        return None  # an ordinary directory
    try:
        (outer / "inner").mkdir(parents=True)
    except OSError:
        return None
    try:
        for name, value in values.items():
            (outer / name).write_text(value)
        return outer / "inner"
    except OSError:
        remove(outer / "inner")
        return None


def remove(inner: Path) -> None:
    inner.rmdir()
    inner.parent.rmdir()


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Real groups with 1.5 GiB and half a CPU, set on the parents of those returned."""
    memory, cpu = str(3 * GIB // 2), {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
    top = SYSTEM / "sys/fs/cgroup"
    both = nested(top, {"memory.max": memory, "cpu.max": "50000 100000"})
    found = [both] if both is not None else [
        nested(top / "memory", {"memory.limit_in_bytes": memory}), nested(top / "cpu", cpu)
    ]  # fmt: skip
    made = [each for each in found if each is not None]
    try:
        if len(made) < len(found):
            pytest.skip("this process may not create control groups")
        yield made
    finally:
        for inner in made:
            remove(inner)


def test_a_process_in_a_real_nested_group(groups: list[Path]) -> None:
    """With ``"auto"`` budgets it took what the machine has, and was killed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, groups)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    budget, quota = map(int, done.stdout.split())
    assert budget < 1.5 * GIB and quota == 1
