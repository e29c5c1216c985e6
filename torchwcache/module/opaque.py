"""Objects whose inside cannot be listed: are two of them the same?"""

from __future__ import annotations

import enum
import logging
import re
import threading
from typing import Any

import torch

__all__ = ["STATELESS", "OpaqueComparison", "same_opaque", "same_type"]


class OpaqueComparison(enum.Enum):
    """What can be said about two opaque objects."""

    SAME = enum.auto()
    DIFFERENT = enum.auto()
    UNKNOWN = enum.auto()


# A lock that the build made is as good as the one that the load used: nobody holds it across processes.
STATELESS = (type(threading.Lock()), type(threading.RLock()), logging.Logger, re.Pattern, object)
_MAX_DEPTH = 20


def same_type(a: type, b: type) -> bool:
    """Whether two classes are one, or were made alike at run time (``torch.nn.utils.parametrize`` makes one per module)."""
    if a is b:
        return True
    if (a.__module__, a.__qualname__) != (b.__module__, b.__qualname__) or len(a.__bases__) != len(b.__bases__):
        return False
    if not all(same_type(x, y) for x, y in zip(a.__bases__, b.__bases__, strict=True)):
        return False
    mine, theirs = a.__dict__, b.__dict__
    return mine.keys() == theirs.keys() and all(_same_member(mine[name], theirs[name]) for name in mine)


def _same_member(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    for part in ("fget", "fset", "fdel", "__func__"):
        if hasattr(a, part):
            x, y = getattr(a, part), getattr(b, part)
            if (x is None) != (y is None) or (x is not None and not _same_member(x, y)):
                return False
    if hasattr(a, "__code__"):
        cells = [c.cell_contents for c in a.__closure__ or ()], [c.cell_contents for c in b.__closure__ or ()]
        return bool(a.__code__ == b.__code__) and all(_same_cell(x, y) for x, y in zip(*cells, strict=True))
    return type(a).__name__ in ("getset_descriptor", "property") or bool(a == b)


def _same_cell(a: Any, b: Any) -> bool:
    if type(a) is type(b) and isinstance(a, (str, int, type(None))):
        return bool(a == b)
    if isinstance(a, torch.nn.Module) and isinstance(b, torch.nn.Module):
        return type(a).__qualname__ == type(b).__qualname__  # a class made for one module holds that module
    return a is b or (hasattr(a, "__code__") and _same_member(a, b))


def same_opaque(a: Any, b: Any, depth: int = 0) -> OpaqueComparison:
    """Compare two objects of one type that have no attributes to walk: by identity, by ``==``, by how they would be pickled."""
    if a is b:
        return OpaqueComparison.SAME
    if type(a) is not type(b):
        return OpaqueComparison.DIFFERENT
    if type(a) in STATELESS and type(a) is not re.Pattern:
        return OpaqueComparison.SAME
    if isinstance(a, (torch.Stream, torch.Event)):
        # Each process makes its own, and what a build made is as good as what the load used, if it is for the same device.
        same = a.device == b.device and getattr(a, "priority", 0) == getattr(b, "priority", 0)
        return OpaqueComparison.SAME if same else OpaqueComparison.DIFFERENT
    if isinstance(a, torch.Generator):
        same = a.device == b.device and torch.equal(a.get_state(), b.get_state())
        return OpaqueComparison.SAME if same else OpaqueComparison.DIFFERENT
    if type(a).__module__ == "numpy":
        same = getattr(a, "dtype", 0) == getattr(b, "dtype", 1) and a.shape == b.shape and a.tobytes() == b.tobytes()
        return OpaqueComparison.SAME if same else OpaqueComparison.DIFFERENT
    if getattr(type(a), "__eq__", None) is not object.__eq__:
        try:
            if bool(a == b):
                return OpaqueComparison.SAME
        except (TypeError, ValueError, RuntimeError):
            return OpaqueComparison.UNKNOWN
    return _same_reduced(a, b, depth)


def _same_reduced(a: Any, b: Any, depth: int) -> OpaqueComparison:
    # The pickling hooks list an object's whole state. They are only compared here; nothing is ever pickled.
    try:
        x, y = a.__reduce_ex__(4), b.__reduce_ex__(4)
    except (TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError):
        return OpaqueComparison.UNKNOWN
    return _same_parts(x, y, depth)


def _same_parts(x: Any, y: Any, depth: int) -> OpaqueComparison:
    if x is y:
        return OpaqueComparison.SAME
    if depth > _MAX_DEPTH:
        return OpaqueComparison.UNKNOWN
    if type(x) is not type(y):
        return OpaqueComparison.DIFFERENT
    if isinstance(x, (str, bytes, int, float, type(None), type)):
        return OpaqueComparison.SAME if x == y else OpaqueComparison.DIFFERENT
    if isinstance(x, dict):
        x, y = list(x.items()), list(y.items())
    if not isinstance(x, (tuple, list)):
        return same_opaque(x, y, depth + 1)
    if len(x) != len(y):
        return OpaqueComparison.DIFFERENT
    results = {_same_parts(p, q, depth + 1) for p, q in zip(x, y, strict=True)}
    for outcome in (OpaqueComparison.DIFFERENT, OpaqueComparison.UNKNOWN):
        if outcome in results:
            return outcome
    return OpaqueComparison.SAME
