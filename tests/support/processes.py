"""Worker processes as a test sees them: real processes with an interpreter of their own, bounded in every wait, ended by pid.

Importing torch takes longer than most tests, so a worker that a test did not kill serves the next one. In between it must have let
go of everything: a mapping or descriptor that is left fails the test that left it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support import worker

__all__ = ["Crew", "RemoteError", "Worker", "WorkerPool", "descriptors_of", "holders_of", "segments_of"]

TESTS = Path(__file__).parents[1]
BOOT = "from support.worker import main; main()"
TIMEOUT_S = 120.0
_PYTHON = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}


class RemoteError(Exception):
    """An exception in a worker."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__(facts["trace"])
        self.type: str = facts["type"]
        self.kinds: list[str] = facts["kinds"]
        self.text: str = facts["text"]
        self.facts: dict[str, str] = facts["facts"]
        self.problems: dict[str, str] = dict(facts["problems"])
        self.cause: str = facts["cause"]


class WorkerDied(Exception):
    """A worker ended instead of answering."""


class Worker:
    """One process."""

    def __init__(self, environment: dict[str, str], *, prefix: Sequence[str] = (), boot: str = BOOT) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._buffer = b""
        self._events: list[str] = []
        self.busy = False
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment, **_PYTHON},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def said(self) -> str:
        """What the process wrote to its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def do(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Carry out a function of ``support.worker``, or of the test's own file, and return its result."""
        self.begin(function, **arguments)
        return self.result()

    def fails(self, function: Callable[..., Any], **arguments: Any) -> RemoteError:
        """As :meth:`do`, for what must raise."""
        with pytest.raises(RemoteError) as caught:
            self.do(function, **arguments)
        return caught.value

    def begin(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Order something without waiting for it."""
        assert not self.busy, "one order at a time"
        order = {"file": function.__code__.co_filename, "name": function.__name__, "arguments": arguments}
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerDied(self.said) from error
        self.busy = True

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait for what was begun."""
        while True:
            message = self._message(timeout_s)
            if "event" in message:
                self._events.append(message["event"])
                continue
            self.busy = False
            if "error" in message:
                raise RemoteError(message["error"])
            return message["result"]

    def wait_for(self, event: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the worker tells of an event."""
        while event not in self._events:
            message = self._message(timeout_s)
            if "event" not in message:
                self.busy = False
                raise (
                    RemoteError(message["error"]) if "error" in message else AssertionError(f"{event!r} did not happen: {message}")
                )
            self._events.append(message["event"])
        self._events.remove(event)

    def _message(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not select.select([self.process.stdout], [], [], remaining_s)[0]:
                raise TimeoutError(f"worker {self.pid} said nothing for {timeout_s:g} s\n{self.said}")
            piece = os.read(self.process.stdout.fileno(), 1 << 20)
            if not piece:
                self.busy = False
                raise WorkerDied(f"worker {self.pid} ended with {self.process.wait(TIMEOUT_S)}\n{self.said}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it with SIGKILL, and wait until it is gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        self.busy = False

    def died_of(self) -> int:
        """Wait for an end that a test expects, and return the signal that brought it."""
        return -self.process.wait(TIMEOUT_S)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.kill()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


class WorkerPool:
    """Workers that are between two tests."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._idle: list[Worker] = []

    def take(self) -> Worker:
        return self._idle.pop() if self._idle else Worker(self._environment)

    def give_back(self, used: Worker) -> None:
        self._idle.append(used)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()


class Crew:
    """The workers of one test. Call it to get one more."""

    def __init__(self, pool: WorkerPool, environment: dict[str, str]) -> None:
        self.environment = environment
        self._pool = pool
        self._pooled: list[Worker] = []
        self._own: list[Worker] = []

    def __call__(self, **environment: str) -> Worker:
        """A worker in the environment of this test."""
        hired = self._pool.take()
        self._pooled.append(hired)
        hired.do(worker.settle, environment={**self.environment, **environment})
        return hired

    def several(self, count: int) -> list[Worker]:
        """So many, whose interpreters start at the same time."""
        hired = [self._pool.take() for _ in range(count)]
        self._pooled += hired
        for one in hired:
            one.begin(worker.settle, environment=self.environment)
        for one in hired:
            one.result()
        return hired

    def fresh(self, *, prefix: Sequence[str] = (), boot: str = BOOT, **environment: str) -> Worker:
        """One that no test had before and none has after: for what cannot be undone in a process."""
        hired = Worker({**self.environment, **environment}, prefix=prefix, boot=boot)
        self._own.append(hired)
        return hired

    def dismiss(self) -> list[str]:
        """End the test; returns what workers still held after letting go of everything."""
        left: list[str] = []
        for hired in self._own:
            hired.end()
        for hired in self._pooled:
            if not hired.is_alive or hired.busy:
                hired.end()
                continue
            try:
                found = hired.do(worker.tidy)
            except (RemoteError, WorkerDied, TimeoutError) as error:
                left.append(f"worker {hired.pid} could not be tidied: {error}")
                hired.end()
                continue
            if found["maps"] or found["memfds"]:
                left.append(f"worker {hired.pid} keeps {found['maps']} mappings and {found['memfds']} descriptors of segments")
                hired.end()
            else:
                self._pool.give_back(hired)
        return left


def descriptors_of(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def segments_of(pid: int) -> set[int]:
    """Inodes of the segments that a process has mapped."""
    with open(f"/proc/{pid}/maps") as file:
        return {int(line.split()[4]) for line in file if "memfd:torchwcache" in line}


def holders_of(segments: set[int]) -> set[int]:
    """Pids of all processes that have one of these segments mapped or open. When there is none, the kernel has freed them."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended, or is somebody else's
            folder = f"/proc/{name}"
            links = [f"{folder}/fd/{number}" for number in os.listdir(f"{folder}/fd")]
            opened = {os.stat(link).st_ino for link in links if "memfd:torchwcache" in os.readlink(link)}
            if segments & (segments_of(int(name)) | opened):
                found.add(int(name))
    return found
