"""Store files against a real system: what is missing, full, limited, locked, killed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from overspill.io_engine import IoEngine, IoError
from overspill.io_engine.committed import own_store
from overspill.io_engine.native import NATIVE
from tests.patience import WAIT_S

MIB = 1 << 20


def run(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, timeout=WAIT_S, check=False, **options,
    )  # fmt: skip


def in_namespace(script: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """Runs a shell script with mounts of its own; skips where that is forbidden."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    probe = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("no user namespaces here")
    return subprocess.run(
        ["unshare", "-Urm", "sh", "-ec", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=tmp_path,
    )  # fmt: skip


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="does not exist; create it"):
        IoEngine(tmp_path / "nowhere", MIB)
    (tmp_path / "file").write_text("")
    with pytest.raises(IoError, match="is not a directory"):
        IoEngine(tmp_path / "file", MIB)
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_directory_without_permission() -> None:
    # Not tmp_path: when root runs this as somebody else, its parents must be open to all.
    with tempfile.TemporaryDirectory() as folder:
        done = run(
            """
            import os, sys
            from pathlib import Path
            from overspill.io_engine import IoEngine, IoError
            top, inner = Path(sys.argv[1]), Path(sys.argv[1]) / "inner"
            inner.mkdir()
            for path, mode in ((inner, 0o500), (top, 0o755)):
                path.chmod(mode)
                if os.getuid() == 0:
                    os.chown(path, 65534, 65534)
            if os.getuid() == 0:
                os.setuid(65534)
            for shut in (False, True):
                top.chmod(0o000 if shut else 0o755)
                for ephemeral in (True, False):
                    try:
                        IoEngine(inner, 1 << 20, ephemeral=ephemeral)
                    except IoError as error:
                        print(error.errno, error)
                top.chmod(0o755)
            print(os.listdir(inner))
            """,
            folder,
        )
        lines = done.stdout.splitlines()
        assert [line[:3] for line in lines] == ["13 "] * 4 + ["[]"], done.stdout + done.stderr
        assert all("write permission" in line for line in lines[:4])


def test_too_little_space_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(IoError, match=r"needs \d+ bytes; \d+ are free; free some") as caught:
        IoEngine(tmp_path, 1 << 60)
    assert caught.value.path == str(tmp_path)
    assert os.listdir(tmp_path) == []


ROUND_TRIP = """
import logging, sys
logging.basicConfig(format="%(message)s")
import numpy as np
from overspill.io_engine import IoEngine
for backend in sys.argv[2:]:
    with IoEngine(sys.argv[1], 1 << 20, backend=backend, ephemeral=True) as engine:
        extent = engine.allocate(300_000)
        with engine.buffer(300_000) as buffer:
            buffer.array[:] = np.arange(300_000) % 251
            want = buffer.array.copy()
            engine.write(extent, buffer).wait(300)
            buffer.array[:] = 0
            engine.read(extent, buffer).wait(300)
            engine.flush()
            print(backend, np.array_equal(buffer.array, want))
"""


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(ROUND_TRIP)
    names = ["auto", "aiofiles"] if NATIVE is None else ["auto", "threads", "aiofiles"]
    done = in_namespace(
        f"mkdir ram; mount -t ramfs ramfs ram; {sys.executable} code.py ram {' '.join(names)}",
        tmp_path,
    )
    assert done.stdout.count("True") == len(names), done.stderr
    assert done.stderr.count("no direct I/O") == len(names)  # once an engine


def test_a_full_file_system(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        textwrap.dedent(
            """
            import os, sys
            from overspill.io_engine import IoEngine, IoError
            held = open(sys.argv[1] + "/other", "wb")
            held.write(bytes(6 << 20)); held.flush()
            try:
                IoEngine(sys.argv[1], 4 << 20)
            except IoError as error:
                print(error)
            print(os.listdir(sys.argv[1]))
            IoEngine(sys.argv[1], 1 << 20).close()
            print(os.listdir(sys.argv[1]))
            """
        )
    )
    done = in_namespace(
        f"mkdir small; mount -t tmpfs -o size=8m tmpfs small; {sys.executable} code.py small",
        tmp_path,
    )
    lines = done.stdout.splitlines()
    assert "needs 4194304 bytes" in lines[0], done.stderr
    assert lines[1:] == ["['other']", "['other']"]


def test_a_second_owner_is_told_of_the_first(tmp_path: Path) -> None:
    with IoEngine(tmp_path, MIB):
        here = rf"in use by this process \(process {os.getpid()} on .*close its store first"
        with pytest.raises(IoError, match=here):
            IoEngine(tmp_path, MIB)
        done = run(
            """
            import sys
            from overspill.io_engine import IoEngine
            IoEngine(sys.argv[1], 1 << 20)
            """,
            tmp_path,
        )
        assert f"in use by process {os.getpid()} on " in done.stderr
        assert "end that process first" in done.stderr
        assert sorted(os.listdir(tmp_path)) == ["overspill.lock", "overspill.store"]
        with IoEngine(tmp_path, MIB, ephemeral=True):  # has no name that could be in the way
            pass
    IoEngine(tmp_path, MIB).close()


WRITER = """
import sys
from overspill.io_engine import IoEngine
engine = IoEngine(sys.argv[1], 64 << 20, ephemeral=sys.argv[2] == "True")
extents = [engine.allocate(8 << 20) for _ in range(8)]
buffer = engine.buffer(8 << 20)
print("ready", flush=True)
while True:
    for ticket in [engine.write(extent, buffer) for extent in extents]:
        ticket.wait()
"""


def kill_a_writer(directory: Path, ephemeral: bool) -> int:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), str(ephemeral)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        return process.pid


def test_leftovers_of_a_killed_owner_are_named_and_never_reused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pid = kill_a_writer(tmp_path, ephemeral=False)
    assert (tmp_path / "overspill.store").stat().st_size == 64 * MIB
    assert json.loads((tmp_path / "overspill.lock").read_text())["pid"] == pid
    with caplog.at_level(logging.WARNING), IoEngine(tmp_path, MIB) as engine:
        assert f"process {pid} on" in caplog.text and "67108864" in caplog.text
        assert (tmp_path / "overspill.store").stat().st_size == MIB
        extent = engine.allocate(MIB)
        with engine.buffer(MIB) as buffer, pytest.raises(Exception, match="never been written"):
            engine.read(extent, buffer).wait(WAIT_S)
    assert os.listdir(tmp_path) == []


def test_an_ephemeral_store_vanishes_with_a_killed_process(tmp_path: Path) -> None:
    kill_a_writer(tmp_path, ephemeral=True)
    assert os.listdir(tmp_path) == []


def test_a_forked_child_leaves_its_parents_store_alone(tmp_path: Path) -> None:
    done = run(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from overspill.io_engine import IoEngine
        engine = IoEngine(sys.argv[1], 1 << 20)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        print(os.waitpid(child, 0)[1], sorted(os.listdir(sys.argv[1])))
        """,
        tmp_path,
    )
    assert done.stdout.strip() == "0 ['overspill.lock', 'overspill.store']", done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("backend", ["auto", "aiofiles"])
def test_an_engine_alive_at_exit_is_closed(tmp_path: Path, backend: str) -> None:
    done = run(
        """
        import sys
        from overspill.io_engine import IoEngine
        engine = IoEngine(sys.argv[1], 8 << 20, backend=sys.argv[2])
        extent, buffer = engine.allocate(8 << 20), engine.buffer(8 << 20)
        tickets = [engine.write(extent, buffer) for _ in range(20)]
        """,
        tmp_path,
        backend,
    )
    assert done.returncode == 0 and done.stderr == ""
    assert os.listdir(tmp_path) == []


def test_unknown_arguments(tmp_path: Path) -> None:
    for options, text in (
        ({"backend": "magic"}, "backend must be"),
        ({"block_bytes": 5000}, "multiple of 4096"),
        ({"queue_depth": 0}, "queue_depth"),
    ):
        with pytest.raises(ValueError, match=text):
            IoEngine(tmp_path, MIB, **options)
    with pytest.raises(ValueError, match="capacity_bytes"):
        IoEngine(tmp_path, -1)
    with pytest.raises(ValueError, match="at least one directory"):
        IoEngine([], MIB)
    with pytest.raises(ValueError, match="named twice"):
        IoEngine([tmp_path, tmp_path / "."], MIB)
    assert os.listdir(tmp_path) == []


def test_without_the_extension_it_runs_on_aiofiles(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(ROUND_TRIP)
    environment = {**os.environ, "OVERSPILL_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "code.py", str(tmp_path), "auto"],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.stdout == "auto True\n", done.stderr
    with IoEngine(tmp_path, MIB, ephemeral=True) as engine:
        assert engine.allocate(np.int64(5)).nbytes == 5


@pytest.mark.skipif(NATIVE is None, reason="no native extension")
@pytest.mark.parametrize("call", [425, 426, 427])  # io_uring_setup, _enter, _register
def test_a_container_that_forbids_io_uring(tmp_path: Path, call: int) -> None:
    done = run(
        """
        import ctypes, logging, struct, sys
        from overspill.io_engine import IoEngine
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        errno_eperm, allow = 0x00050001, 0x7FFF0000
        steps = [
            struct.pack("HBBI", 0x20, 0, 0, 0),  # load the number of the call
            struct.pack("HBBI", 0x15, 0, 1, int(sys.argv[2])),
            struct.pack("HBBI", 0x06, 0, 0, errno_eperm),
            struct.pack("HBBI", 0x06, 0, 0, allow),
        ]
        code = ctypes.create_string_buffer(b"".join(steps))
        program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
        with IoEngine(sys.argv[1], 1 << 20) as engine:
            extent = engine.allocate(4096)
            with engine.buffer(4096) as buffer:
                engine.write(extent, buffer).wait(300)
                engine.read(extent, buffer).wait(300)
            print(engine.backend)
        try:
            IoEngine(sys.argv[1], 1 << 20, backend="uring")
        except RuntimeError as error:
            print(error)
        """,
        tmp_path,
        call,
        env={**os.environ, "OVERSPILL_CACHE": str(tmp_path / "cache")},
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "threads", done.stderr
    assert "cannot run here" in lines[1] and "Operation not permitted" in lines[1]
    assert done.stderr.count("no io_uring here") == 1


def test_what_is_sparse_takes_room_when_it_is_written(tmp_path: Path) -> None:
    taken = lambda: (tmp_path / "overspill.store").stat().st_blocks * 512  # noqa: E731
    with IoEngine(tmp_path, 24 * MIB, sparse_bytes=16 * MIB, block_bytes=64 << 10) as engine:
        first, second = engine.allocate(8 * MIB), engine.allocate(16 * MIB)
        before = taken()
        assert 8 * MIB <= before < 9 * MIB
        data = np.arange(16 * MIB, dtype=np.uint32).view(np.uint8)[: 16 * MIB]
        with engine.buffer(16 * MIB) as memory:
            for extent in (first, second):
                memory.array[: extent.nbytes] = data[: extent.nbytes]
                engine.write(extent, memory.array[: extent.nbytes]).wait()
            assert taken() >= before + 16 * MIB
            memory.array[:] = 0
            engine.read(second, memory).wait()
            assert np.array_equal(memory.array, data)


def test_a_store_that_is_opened_again_stays_sparse(tmp_path: Path) -> None:
    place = tmp_path / "overspill.store"
    with IoEngine(tmp_path, 24 * MIB, sparse_bytes=16 * MIB) as engine:
        first, second = engine.allocate(8 * MIB), engine.allocate(16 * MIB)
        manifest = engine.make_durable([("a", [first]), ("b", [second])], {})
        with engine.buffer(8 * MIB) as memory:
            memory.array[:] = 7
            engine.write(first, memory).wait()
        engine.flush()
        manifest.commit(1, [0, -1], [engine.checksums(first), None], b"")
        manifest.close()
    before = place.stat()
    assert before.st_size == 24 * MIB and before.st_blocks * 512 < 9 * MIB
    store = own_store(tmp_path)
    with IoEngine.reopen(store, store.last(), extra_bytes=2 * MIB):
        grown = place.stat()
    assert grown.st_size == 26 * MIB and grown.st_blocks * 512 < 11 * MIB
