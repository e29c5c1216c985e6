"""Plain attributes of modules and of what they hold: recorded by the producer, compared by every client (design D11)."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from typing import Any

from torchwcache.encoding import Encoder, Value
from torchwcache.module.graph import ATOMIC_TYPES, HOOK_DICTS, MODULE_TABLES

__all__ = ["MISSING", "attribute_names", "built_attribute", "encode_attribute"]

MISSING = object()

_SKIPPED = MODULE_TABLES | HOOK_DICTS | {"_is_full_backward_hook", "_backward_hooks"}
_CONTAINERS = (tuple, list, dict, set, frozenset)
_MAX_ITEMS = 64

_encoder = Encoder()


def attribute_names(obj: Any) -> Iterator[str]:
    """Names in the ``__dict__`` of a module, or of an object that it holds, that may hold a plain value."""
    return (name for name in obj.__dict__ if name not in _SKIPPED)


def built_attribute(tensor: Any, name: str) -> Any:
    """What a tensor of the build has under a name, or :data:`MISSING`: in its ``__dict__``, or as a property of its class.

    Engines load into tensors of classes of their own, with a property for the loader, and end with plain parameters that have it as
    an attribute (vLLM's ``BasevLLMParameter.weight_loader`` and ``replace_parameter``).
    """
    if name in tensor.__dict__:
        return tensor.__dict__[name]
    found = inspect.getattr_static(type(tensor), name, None)
    try:
        return found.__get__(tensor) if isinstance(found, property) else MISSING
    except Exception:  # code of its class: what it cannot give is not there
        return MISSING


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
