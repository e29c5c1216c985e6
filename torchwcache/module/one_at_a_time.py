"""Builds and loads of one process, one after the other.

Transformers sets the default dtype, and more, for the whole process while it builds or loads a model. Two threads that do so at
once get tensors of the other's dtype, publish them, and leave the default changed for good.

Nor is a build or load the first to compute in its process: see ``torchwcache.module.vml``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torchwcache.module.vml import choose_vml_kernels

__all__ = ["one_at_a_time"]

_lock = threading.RLock()


def _renew() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that held it does not exist in the child


os.register_at_fork(after_in_child=_renew)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread of this process builds or loads. A thread that is inside may enter again."""
    with _lock:
        choose_vml_kernels()
        yield
