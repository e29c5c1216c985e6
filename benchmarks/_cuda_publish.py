"""Looks into a publish from outside: where its time goes, and how much memory it takes at the most."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import torchwcache.production
from torchwcache.memory.select import memory_for

_SAMPLE_S = 0.001


class Watch:
    """Wraps the methods of a device's memory while a publish runs.

    Copies on a GPU go on while Python does; freeing waits for them anyway. They are waited for before that, so that their time
    is not taken for that of freeing.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.memory = memory_for(device)
        self._clear()

    def _clear(self) -> None:
        self.seconds = {"pack": 0.0, "allocate": 0.0, "release": 0.0, "seal": 0.0}
        self.segments: list[int] = []
        self.used_before = self.used_most = 0
        self._sampling = False

    @contextlib.contextmanager
    def on(self, *, memory: bool) -> Iterator[None]:
        """Watch a publish; with ``memory`` its memory, which takes time of its own."""
        self._clear()
        self.release()
        self._sampling = memory
        self.used_before = self.used_most = self.used_nbytes()
        kind = type(self.memory)
        with contextlib.ExitStack() as stack:
            self._wrap(stack, kind, "allocate", self._timed("allocate"), self._allocated)
            self._wrap(stack, kind, "release_freed", self._timed("release"), self._sample)
            self._wrap(stack, torchwcache.production, "pack", self._timed("pack"), self._sample)
            self._stack = stack
            if memory:
                stack.enter_context(self._sampler())
            yield

    def _wrap(
        self, stack: contextlib.ExitStack, owner: Any, name: str, timed: Callable[..., Any], after: Callable[..., Any]
    ) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found = timed(original, *args, **kwargs)
            after(found)
            return found

        setattr(owner, name, wrapped)
        stack.callback(setattr, owner, name, original)

    def _timed(self, name: str) -> Callable[..., Any]:
        def timed(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if name in ("release", "seal"):
                self._wait_for_copies()
            started = time.perf_counter()
            found = original(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - started
            return found

        return timed

    def _allocated(self, segment: Any) -> None:
        if not self.segments:
            self._wrap(self._stack, type(segment), "seal", self._timed("seal"), self._sample)
        self.segments.append(segment.nbytes)
        self._sample(segment)

    def _wait_for_copies(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    # ---- memory --------------------------------------------------------------------------------------------------------------

    def _sample(self, _: Any = None) -> None:
        if self._sampling:
            self.used_most = max(self.used_most, self.used_nbytes())

    @contextlib.contextmanager
    def _sampler(self) -> Iterator[None]:
        stop = threading.Event()

        def sample() -> None:
            while not stop.wait(_SAMPLE_S):
                self._sample()

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def used_nbytes(self) -> int:
        """Of the device, by whoever; on the host, by this process."""
        if self.device == "cpu":
            return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) * 1024
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def release(self) -> None:
        """Give back what this process does not use any more."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def found(self) -> dict[str, Any]:
        """Of the last publish."""
        return {
            "split": dict(self.seconds),
            "segments": len(self.segments),
            "segment_nbytes": max(self.segments),
            "segments_nbytes": sum(self.segments),
            "extra_nbytes": self.used_most - self.used_before,
        }
