"""Room in this process's table of file descriptors, made before it is needed. Imports no torch.

A process starts with room for 64 (or 256) open files. When more are opened the kernel makes a larger table, and where several
threads share the old one it waits until no core can still be looking at it (``expand_fdtable`` and ``synchronize_rcu`` in Linux's
``fs/file.c``): some 10 ms. A process that uses a GPU has threads, and some 40 files open; with the descriptors of an entry it would
cross that line while it waits for the daemon's answer. So a thread of its own does it while the module is being built.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

__all__ = ["widen_table"]

_ROOM = 512


def widen_table(room: int = _ROOM) -> threading.Thread:
    """See to it that ``room`` files can be open without another table; in the background, and without opening any for good.

    Returns:
        The thread that does it, for those who want to wait.
    """
    thread = threading.Thread(target=_widen, args=(room,), name="torchwcache-descriptors", daemon=True)
    thread.start()
    return thread


def _widen(room: int) -> None:
    with contextlib.suppress(OSError):  # a limit below that: the table grows when it must
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, room - 1))
        finally:
            os.close(fd)
