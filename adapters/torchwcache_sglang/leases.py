"""Whether models of this process live on shared memory."""

from __future__ import annotations

__all__ = ["anything_shared", "mapped_nbytes", "remember"]

_shared = False
_mapped_nbytes = 0


def remember(*, shared: bool, nbytes: int = 0) -> None:
    """Note a model that the engine serves from now on.

    Args:
        shared: Whether weights of any rank of this model are shared: what ranks do together, all must refuse together.
        nbytes: Bytes of shared memory that this rank's lie in.
    """
    global _shared, _mapped_nbytes
    _shared = _shared or shared
    _mapped_nbytes += nbytes


def mapped_nbytes() -> int:
    """Bytes of shared memory that the models of this process lie in, a draft's among them."""
    return _mapped_nbytes


def anything_shared() -> bool:
    """Whether writing weights in place would meet shared memory, in this rank or in another."""
    return _shared
