"""The models of this process that live on shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchwcache.attachment import Attachment

__all__ = ["anything_shared", "remember"]

_held: list[Attachment] = []
_shared = False


def remember(attachment: Attachment, *, shared: bool) -> None:
    """Keep an attachment for as long as the process lives.

    Args:
        attachment: Of a model that the engine serves from now on.
        shared: Whether weights of any rank of this model are shared: what ranks do together, all must refuse together.
    """
    global _shared
    _held.append(attachment)
    _shared = _shared or shared


def anything_shared() -> bool:
    """Whether writing weights in place would meet shared memory, in this rank or in another."""
    return _shared
