"""Plain attributes of modules and of what they hold: recorded by the producer, compared by every client (design D11)."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from torchwcache.encoding import Encoder, Value
from torchwcache.module.graph import ATOMIC_TYPES, HOOK_DICTS, MODULE_TABLES

__all__ = ["attribute_names", "encode_attribute"]

_SKIPPED = MODULE_TABLES | HOOK_DICTS | {"_is_full_backward_hook", "_backward_hooks"}
_CONTAINERS = (tuple, list, dict, set, frozenset)
_MAX_ITEMS = 64

_encoder = Encoder()


def attribute_names(obj: Any) -> Iterator[str]:
    """Names in the ``__dict__`` of a module, or of an object that it holds, that may hold a plain value."""
    return (name for name in obj.__dict__ if name not in _SKIPPED)


def encode_attribute(obj: Any) -> Value | None:
    """A plain value in tagged form, ``None`` for what is not plain (or too long to repeat in a manifest).

    Raises:
        EncodingError: A container holds something that is not plain.
    """
    kind = type(obj)
    if kind in ATOMIC_TYPES or isinstance(obj, enum.Enum):
        return _encoder.value(obj, "$")
    if kind in _CONTAINERS and len(obj) <= _MAX_ITEMS:
        return _encoder.value(obj, "$")
    return None
