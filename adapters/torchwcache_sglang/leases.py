"""Whether models of this process live on shared memory."""

from __future__ import annotations

__all__ = ["anything_shared", "remember"]

_shared = False


def remember(*, shared: bool) -> None:
    """Note a model that the engine serves from now on.

    Args:
        shared: Whether weights of any rank of this model are shared: what ranks do together, all must refuse together.
    """
    global _shared
    _shared = _shared or shared


def anything_shared() -> bool:
    """Whether writing weights in place would meet shared memory, in this rank or in another."""
    return _shared
