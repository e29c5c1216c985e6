"""The Python-side half of a description: every place that a module reaches and that holds no tensor."""

from __future__ import annotations

import enum
import fnmatch
import functools
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from torchwcache.encoding import Value, VList, VStr, VTuple, canonical_bytes, encode
from torchwcache.errors import EncodingError
from torchwcache.identity.bytecode import code_record
from torchwcache.module.classes import class_attributes, tree_classes
from torchwcache.module.graph import ATOMIC_TYPES, HOOK_DICTS, MODULE_TABLES, children, is_leaf, type_name
from torchwcache.module.opaque import STATELESS
from torchwcache.module.pairing import has_state
from torchwcache.verification.description import StateFacts
from torchwcache.verification.digests import digest_of_bytes, digest_of_tensor

__all__ = ["StateWalk", "class_facts"]

_MAX_REDUCED_DEPTH = 20
_BY_NAME = ("attribute", "slot", "tensor_attribute")


class StateWalk:
    """Walks everything that modules hold, breadth first, so that the first path of a shared object is a short one.

    Args:
        ignore: Patterns of paths to leave out.
        on_tensor: Called for every place that holds a tensor, with its path; says whether it is the first place of that tensor.
    """

    def __init__(self, ignore: Iterable[str], on_tensor: Callable[[torch.Tensor, str], bool]) -> None:
        self.facts: dict[str, StateFacts] = {}
        self._ignore = tuple(ignore)
        self._on_tensor = on_tensor
        self._seen: dict[int, tuple[str, Any]] = {}  # with the object, so that its id stays its own
        self._queue: deque[tuple[Any, str, int]] = deque()

    def know(self, module: nn.Module, path: str) -> None:
        """Name a module of the tree, before anything refers to it."""
        self._seen.setdefault(id(module), (path, module))

    def module(self, module: nn.Module, path: str) -> None:
        """Describe what a module of the tree holds, but for its tables."""
        for kind, name, value in _sorted_children(module):
            if name in MODULE_TABLES and kind == "attribute":
                continue
            self.visit(value, f"{path}.{name}" if path else str(name))
        self.drain()

    def tensor(self, tensor: torch.Tensor, path: str) -> None:
        """Describe what a tensor has as attributes."""
        self._inside(tensor, path, 0)
        self.drain()

    def visit(self, value: Any, path: str, depth: int = 0) -> None:
        """Describe one place, and put what is inside on the queue."""
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in self._ignore):
            return
        if isinstance(value, torch.Tensor):
            if self._on_tensor(value, path) and value.__dict__:
                self._queue.append((value, path, depth))
            return
        plain = _plain(value)
        if plain is not None:
            self.facts[path] = plain
            return
        kind = type_name(type(value))
        if isinstance(value, (tuple, types.MethodType, frozenset, weakref.ref)):
            # Their identity is no state: they cannot change, and a rebind makes them anew.
            self.facts[path] = StateFacts(kind="object", type=kind, value=self._token(value, path))
            self._queue.append((value, path, depth))
            return
        first = self._seen.setdefault(id(value), (path, value))[0]
        if first != path:
            self.facts[path] = StateFacts(kind="object", type=kind, same_as=first or "(root)")
            return
        self.facts[path] = self._object(value, path, kind, depth)

    def _object(self, value: Any, path: str, kind: str, depth: int) -> StateFacts:
        known = isinstance(value, (dict, list, deque, set, types.FunctionType, functools.partial)) or has_state(value)
        if known:
            self._queue.append((value, path, depth))
            return StateFacts(kind="object", type=kind, value=self._token(value, path), same_as=path)
        return self._opaque(value, path, kind, depth)

    def drain(self) -> None:
        """Describe what is inside all that was visited."""
        while self._queue:
            self._inside(*self._queue.popleft())

    def _inside(self, obj: Any, path: str, depth: int) -> None:
        hooks = _is_hooks(path)
        for number, (kind, key, value) in enumerate(_sorted_children(obj)):
            if kind in _BY_NAME:
                place = f"{path}.{key}"
            elif kind == "key":
                place = f"{path}[{number if hooks else _key_text(key, number)}]"
            elif kind == "index":
                place = f"{path}[{key}]"
            elif kind in ("function", "self"):
                place = f"{path}.__{'func' if kind == 'function' else 'self'}__"
            else:
                place = f"{path}.<{kind}>" if key is None else f"{path}.<{kind} {key}>"
            self.visit(value, place, depth)

    # ---- what tells two objects of one type apart, beyond what they hold -----------------------------------------------------

    def _token(self, value: Any, path: str) -> Value | None:
        if isinstance(value, (list, tuple, deque)) or _is_hooks(path):  # the keys of hooks come from a counter of the process
            return VStr(f"{len(value)} items")
        if isinstance(value, dict):
            return VList(tuple(self._name_of(key) for key in value))
        if isinstance(value, (set, frozenset)):
            return VList(tuple(sorted((self._name_of(item) for item in value), key=canonical_bytes)))
        if isinstance(value, types.FunctionType):
            return VTuple((VStr(f"{value.__module__}:{value.__qualname__}"), VStr(_code_digest(value.__code__))))
        if isinstance(value, weakref.ref):
            return VStr("dead" if value() is None else "alive")
        return None

    def _name_of(self, obj: Any) -> Value:
        try:
            return encode(obj)
        except EncodingError:
            known = self._seen.get(id(obj))
            return VStr(f"<{known[0] or '(root)'}>" if known is not None else f"<{type_name(type(obj))}>")

    def _opaque(self, value: Any, path: str, kind: str, depth: int) -> StateFacts:
        if isinstance(value, re.Pattern):
            return StateFacts(kind="value", type=kind, value=encode((value.pattern, value.flags)))
        if type(value) in STATELESS:
            return StateFacts(kind="object", type=kind, same_as=path)
        if isinstance(value, torch.Generator):
            state = digest_of_bytes(value.get_state().numpy().tobytes())
            return StateFacts(kind="value", type=kind, value=encode((str(value.device), state)))
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            facts = (str(value.dtype), tuple(value.shape), digest_of_bytes(value.tobytes()))
            return StateFacts(kind="value", type=kind, value=encode(facts), same_as=path)
        try:
            # The pickling hooks list an object's whole state. It is only described here; nothing is ever pickled.
            parts = value.__reduce_ex__(4) if depth < _MAX_REDUCED_DEPTH else None
        except (TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError):
            parts = None
        if parts is None:
            return StateFacts(kind="opaque", type=kind, same_as=path)
        items = (parts,) if isinstance(parts, str) else tuple(list(p) if isinstance(p, Iterator) else p for p in parts)
        for i, part in enumerate(items):
            if part is not value:
                self.visit(part, f"{path}.<reduced {i}>", depth + 1)
        return StateFacts(kind="object", type=kind, same_as=path)


def _is_hooks(path: str) -> bool:
    return path.rpartition(".")[2] in HOOK_DICTS


def _sorted_children(obj: Any) -> Iterator[tuple[str, Any, Any]]:
    """What is held by name in the order of the names, all else in its own order: a ``__dict__`` has none that means anything."""
    found = list(children(obj))
    yield from (item for item in found if item[0] not in _BY_NAME)
    yield from sorted((item for item in found if item[0] in _BY_NAME), key=lambda item: (item[0], str(item[1])))


def _key_text(key: Any, number: int) -> str:
    try:
        encode(key)
    except EncodingError:
        return f"<{type_name(type(key))} {number}>"
    return repr(key)


def _plain(value: Any) -> StateFacts | None:
    kind = type_name(type(value))
    if type(value) in ATOMIC_TYPES or isinstance(value, enum.Enum):
        try:
            return StateFacts(kind="value", type=kind, value=encode(value))
        except EncodingError:
            return StateFacts(kind="value", type=kind, value=VStr(repr(value)))
    if not is_leaf(value):
        return None
    if isinstance(value, types.CodeType):
        return StateFacts(kind="value", type=kind, value=VStr(_code_digest(value)))
    if isinstance(value, type):
        return StateFacts(kind="value", type=kind, value=VStr(type_name(value)))
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    module = getattr(value, "__module__", "") or ""
    return StateFacts(kind="value", type=kind, value=VStr(f"{module}:{name}"))


@functools.lru_cache(maxsize=65536)
def _code_digest(code: types.CodeType) -> str:
    def constant(item: object) -> object:
        return code_record(item, constant) if isinstance(item, types.CodeType) else item

    try:
        return digest_of_bytes(canonical_bytes(encode(code_record(code, constant))))
    except EncodingError:
        return code.co_qualname


def class_facts(module: nn.Module) -> dict[str, StateFacts]:
    """Class attributes of the tree's classes, and what is inside them: a load that changes one changes the module."""

    def on_tensor(tensor: torch.Tensor, path: str) -> bool:
        facts = (str(tensor.dtype), tuple(tensor.shape), digest_of_tensor(tensor) if not tensor.is_meta else "meta")
        walk.facts[path] = StateFacts(kind="value", type=type_name(type(tensor)), value=encode(facts))
        return False

    walk = StateWalk((), on_tensor)
    for name, cls in sorted(tree_classes(module).items()):
        for attribute, value in sorted(class_attributes(cls).items()):
            walk.visit(value, f"{name}.{attribute}")
    walk.drain()
    return walk.facts
