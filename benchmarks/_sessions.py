"""Processes that were started in a session of their own (``start_new_session``), ended with what they leave. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["end_session"]

_SHARED_MEMORY = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)


def end_session(session: int, *, timeout_s: float = 30.0) -> None:
    """``kill -9`` of every process of a session, and of the names in /dev/shm that they had mapped, unless others have, too.

    Engines, and Python's ``multiprocessing``, name their shared memory there; whoever is killed cannot remove it. What the dead of
    an earlier ``kill`` had mapped alone is not found. Idempotent. The caller reaps its own child.

    Args:
        session: The pid of its first process.
        timeout_s: How long the kernel may take to end them.

    Raises:
        TimeoutError: They did not end.
    """
    mapped: set[str] = set()
    deadline = time.monotonic() + timeout_s
    while pids := [pid for pid in _living() if _session(pid) == session]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} of session {session} do not end")
        mapped |= _mapped(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # whoever was making a process meanwhile may have made one more
    for name in mapped - (_mapped(_living()) if mapped else set()):
        with contextlib.suppress(OSError):
            os.unlink(name)


def _living() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _session(pid: int) -> int:
    """The session of a process that runs; -1 for one that does not any more."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(fields[2])


def _mapped(pids: Iterable[int]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(_SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    return found
