"""Workers on a GPU, and whose turn it is: workers of pytest-xdist share one GPU, and some tests measure all of its memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator

from support import gpu_worker
from support.processes import Crew, RemoteError, WorkerDied

__all__ = ["GpuCrew", "turn"]


class GpuCrew(Crew):
    """Workers that must have let go of the GPU's memory when a test ends."""

    def dismiss(self) -> list[str]:
        """End the test; returns what workers still held after letting go of everything."""
        left = []
        for hired in self._pooled:
            if hired.is_alive and not hired.busy:
                try:
                    mapped = hired.do(gpu_worker.let_go)
                except (RemoteError, WorkerDied, TimeoutError) as error:
                    left.append(f"worker {hired.pid} could not let go: {error}")
                    hired.kill()
                    continue
                if mapped:
                    left.append(f"worker {hired.pid} keeps {len(mapped)} mappings")
                    hired.kill()
        return left + super().dismiss()


@contextlib.contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Wait until this test may run: together with others, or while no other does.

    Whoever waits to be alone stands in the door, so that those who come later wait too and the room empties.
    """
    place = os.path.join(tempfile.gettempdir(), f"torchwcache-tests-gpu-{os.getuid()}")
    with open(f"{place}.door", "w") as door, open(f"{place}.room", "w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
