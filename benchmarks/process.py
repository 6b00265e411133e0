"""An arm in a process of its own: asked by lines of JSON, and ended when it does not answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from .machine import ROOT
from .peers import environment_of, python_of
from .serving import SHOW_STACKS

STACKS_S = 0.5  # that an arm has to tell where it hangs
LIMIT_S = 600.0  # the first answer of a peer may wait for its extensions to be compiled


class Process:
    """``python -m benchmarks.MODULE`` with this interpreter, or in the environment of ``peer``.

    Has a session of its own: whatever it starts, such as a compiler, ends with it.

    Raises:
        RuntimeError: the peer is not installed; the command that installs it.
    """

    def __init__(self, module: str, arguments: tuple[str, ...] = (), peer: str | None = None):
        python, environment = sys.executable, None
        if peer is not None:
            there = python_of(peer)
            python, environment = str(there), environment_of(there)
        self._ended = ""
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.{module}", *arguments],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, order: Mapping[str, Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Its answer to one order.

        Raises:
            RuntimeError: it failed, ended, or did not answer within ``limit_s`` and was killed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(limit_s, self.kill, [f"no answer after {limit_s:.0f} s"])
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            why = self._ended or f"code {self._process.wait()}"
            raise RuntimeError(f"its process was ended: {why}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def kill(self, why: str) -> None:
        """Ends it and all that it started; whoever waits for an answer gets an error.  What its
        threads do then is told on stderr."""
        self._ended = self._ended or why
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, SHOW_STACKS)
                time.sleep(STACKS_S)
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets it end, and waits for that; one that does not is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.kill("it did not end")
            self._process.wait()
        self._process.stdout.close()
