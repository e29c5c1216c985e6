"""Processes that were started in a session of their own (``start_new_session``), ended with what they leave. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

__all__ = ["end_session", "named_memory"]

_PREFIXES = ("psm_", "sem.mp-", "torch_", "multi_tokenizer_args_", "sgl_", "sglang_", "vllm_")
"""What Python's ``multiprocessing``, torch and the engines name so: a checkpoint may lie in /dev/shm, too."""
_MAPPED = re.compile(r"^\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+) +/dev/shm/", re.MULTILINE)


def named_memory(leader: subprocess.Popen[Any]) -> set[str]:
    """The shared memory that processes of a session have mapped. Some engines leave theirs behind when they end by themselves."""
    return _mapped(_members(leader.pid)) if leader.returncode is None else set()


def end_session(leader: subprocess.Popen[Any], *, named: Iterable[str] = (), timeout_s: float = 30.0) -> None:
    """``kill -9`` of every process of a session, and of the shared memory that they had mapped, unless others have it, too.

    Whoever is killed cannot remove what it named in /dev/shm. Idempotent.

    Args:
        leader: The session's first process, a child of this one. It is waited for.
        named: What :func:`named_memory` found before some of them ended.
        timeout_s: How long the kernel may take to end them.

    Raises:
        TimeoutError: They did not end.
        ValueError: The process leads no session: it was started without ``start_new_session``.
    """
    session = leader.pid
    if leader.returncode is None and os.getsid(session) != session:
        raise ValueError(f"process {session} leads no session of its own")
    mapped = set(named)
    deadline = time.monotonic() + timeout_s
    # Once the leader was waited for, its number may be that of a stranger, who then leads the session of that number.
    while (leader.returncode is None or _session(session) < 0) and (pids := _members(session)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} of session {session} do not end")
        mapped |= _mapped(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # whoever was making a process meanwhile may have made one more
    leader.wait(timeout_s)
    for name in mapped - (_mapped(_living()) if mapped else set()):
        with contextlib.suppress(OSError):
            os.unlink(name)


def _living() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _members(session: int) -> list[int]:
    return [pid for pid in _living() if _session(pid) == session]


def _session(pid: int) -> int:
    """The session of a process that runs; -1 for one that does not any more."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(fields[2])


def _mapped(pids: Collection[int]) -> set[str]:
    """By their inodes: a semaphore is mapped under another name, before it gets its own."""
    inodes: set[tuple[int, int]] = set()
    # SGLang closes it after writing, and removes it when it ends.
    found = {f"/dev/shm/multi_tokenizer_args_{pid}" for pid in pids}
    for pid in pids:
        with contextlib.suppress(OSError):
            for major, minor, inode in _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")):
                inodes.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    for entry in os.scandir("/dev/shm") if inodes else ():
        with contextlib.suppress(OSError):
            if entry.name.startswith(_PREFIXES) and (entry.stat().st_dev, entry.inode()) in inodes:
                found.add(entry.path)
    return {name for name in found if os.path.exists(name)}
