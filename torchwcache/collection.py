"""Garbage collection while very many objects are made that all stay. Imports no torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused"]


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection in between: it would find nothing and, for an entry of 100,000 tensors, cost as much as all else together.

    Collection is as it was afterwards; may be nested. Another thread's garbage waits meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
