"""Kill a process at a chosen system call that changes files.

``ptrace`` stops every thread of the process at every system call, so that native code is stopped
too: torch's writer, direct I/O on a thread of its own, the link loader's ``renameat2``. If the last
call is a write, half of it is done first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

SEIZE, INTERRUPT, SYSCALL, CONT, LISTEN, POKEUSER = 0x4206, 0x4207, 24, 7, 0x4208, 6
GET_SYSCALL_INFO, GETEVENTMSG = 0x420E, 0x4201
TRACESYSGOOD, TRACECLONE, EXITKILL = 1, 8, 1 << 20
WALL = 0x40000000
STOPPED_IN_CALL = signal.SIGTRAP | 0x80
PIECE = 4096  # of a write that is cut: direct I/O takes whole ones

_CALLS = {
    "x86_64": {
        1: "write", 18: "pwrite64", 20: "writev", 296: "pwritev", 328: "pwritev2", 2: "open",
        257: "openat", 85: "creat", 77: "ftruncate", 76: "truncate", 285: "fallocate",
        74: "fsync", 75: "fdatasync", 82: "rename", 264: "renameat", 316: "renameat2",
        87: "unlink", 263: "unlinkat", 83: "mkdir", 258: "mkdirat", 84: "rmdir", 86: "link",
        265: "linkat", 40: "sendfile", 326: "copy_file_range",
    },
    "aarch64": {
        64: "write", 68: "pwrite64", 66: "writev", 70: "pwritev", 287: "pwritev2", 56: "openat",
        46: "ftruncate", 45: "truncate", 47: "fallocate", 82: "fsync", 83: "fdatasync",
        38: "renameat", 276: "renameat2", 35: "unlinkat", 34: "mkdirat", 37: "linkat",
        71: "sendfile", 285: "copy_file_range",
    },
}  # fmt: skip
CALLS = _CALLS.get(platform.machine(), {})
_COUNT_REGISTER = 96 if platform.machine() == "x86_64" else None  # rdx, in ``struct user``
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class _Info(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint8), ("pad", ctypes.c_uint8 * 3), ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64), ("stack", ctypes.c_uint64), ("number", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
    ]  # fmt: skip


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(what: int, pid: int, address: int = 0, data: int | ctypes.Structure = 0) -> None:
    given = ctypes.addressof(data) if isinstance(data, ctypes.Structure) else data
    if _libc.ptrace(what, pid, address, given) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def can_trace() -> bool:
    """Whether this process may trace its children, and knows the machine's system calls."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        _ptrace(SEIZE, pid)
    except OSError:
        return False
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, WALL)
    return bool(CALLS)


@dataclass
class Traced:
    """A process that was traced: the calls that it made, and how it ended."""

    calls: list[str] = field(default_factory=list)
    killed: bool = False
    code: int = 0


def run(body: Callable[[Callable[[], None]], None], kill_at: int | None = None) -> Traced:
    """Run ``body`` in a child process; from the instant at which it calls what it is given, its
    system calls that change files are counted, and with number ``kill_at`` it is killed.

    The child ends when ``body`` returns: 0, or 1 after an exception.
    """
    told, tell = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        os.close(go)
        _child(body, wait, tell)
    os.close(wait)
    os.close(tell)
    found = Traced()
    try:
        if os.read(told, 1):
            _attach(pid)
            os.write(go, b"g")
            _trace(pid, found, kill_at)
        else:  # it ended before it was ready
            found.code = os.waitstatus_to_exitcode(os.waitpid(pid, WALL)[1])
    finally:
        os.close(told)
        os.close(go)
    return found


def _child(body: Callable[[Callable[[], None]], None], wait: int, tell: int) -> None:
    def ready() -> None:
        os.write(tell, b"r")
        os.read(wait, 1)

    code = 1
    try:
        body(ready)
        code = 0
    except BaseException as error:
        import traceback

        traceback.print_exception(error)
    finally:
        os._exit(code)


def _attach(pid: int) -> None:
    """Seize all threads, those that come in between included."""
    seized = set[int]()
    while True:
        threads = {int(name) for name in os.listdir(f"/proc/{pid}/task")} - seized
        if not threads:
            return
        for thread in threads:
            try:
                _ptrace(SEIZE, thread, 0, TRACESYSGOOD | TRACECLONE | EXITKILL)
                _ptrace(INTERRUPT, thread)
            except ProcessLookupError:
                pass  # it has ended meanwhile
            except PermissionError:
                pass  # seized along with the thread that made it
            seized.add(thread)


def _trace(pid: int, found: Traced, kill_at: int | None) -> None:
    cut = 0  # the thread whose write is cut short
    while True:
        thread, status = os.waitpid(-1, WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread == pid:
                found.code = os.waitstatus_to_exitcode(status)
                return
            continue
        number, event = os.WSTOPSIG(status), status >> 16
        deliver = 0
        if number == STOPPED_IN_CALL:
            if thread == cut:
                found.killed = True
                os.kill(pid, signal.SIGKILL)
                continue
            name, args = _call(thread)
            if name is not None:
                found.calls.append(name)
                if len(found.calls) == kill_at:
                    if _cut_short(thread, name, args):
                        cut = thread
                    else:
                        found.killed = True
                        os.kill(pid, signal.SIGKILL)
                        continue
        elif not event and number not in (signal.SIGTRAP, signal.SIGSTOP):
            deliver = number
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile
            _ptrace(SYSCALL, thread, 0, deliver)


def _call(thread: int) -> tuple[str | None, list[int]]:
    """The name of the call that a thread begins, if it may change a file."""
    info = _Info()
    _ptrace(GET_SYSCALL_INFO, thread, ctypes.sizeof(info), info)
    if info.op != 1:  # the end of one
        return None, []
    name, args = CALLS.get(info.number), list(info.args)
    if name in ("open", "openat") and not args[1 if name == "open" else 2] & _WRITES:
        return None, []
    if name in ("write", "writev") and args[0] <= 2:
        return None, []
    return name, args


def _cut_short(thread: int, name: str, args: list[int]) -> bool:
    """Have a write do half of its work; whether it can."""
    if name not in ("write", "pwrite64") or _COUNT_REGISTER is None or args[2] < 2:
        return False
    half = args[2] // 2
    half = half // PIECE * PIECE if name == "pwrite64" else half
    if not half:
        return False
    _ptrace(POKEUSER, thread, _COUNT_REGISTER, half)
    return True
