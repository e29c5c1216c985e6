"""Is anything on the meta device still reachable from a module? The last check before a module is served."""

from __future__ import annotations

import gc
import sys
import types
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from torchwcache.module.graph import ATOMIC_TYPES, children, is_leaf
from torchwcache.module.tree import Tree

__all__ = ["BATCH", "LastCheck", "find_meta_tensors"]

# Never entered: a function's globals or a class would lead into every module that is loaded.
_CLOSED: frozenset[type] = ATOMIC_TYPES | {
    type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.GetSetDescriptorType,
    types.MappingProxyType, types.WrapperDescriptorType, types.MethodDescriptorType, torch.dtype,
}  # fmt: skip


# What these hold is what they contain, so an empty one leads nowhere. An ``OrderedDict`` may have attributes besides.
_CONTAINERS: frozenset[type] = frozenset({dict, list, set, tuple, frozenset})

BATCH = 100
"""So many modules are asked about at once: few enough that the second look at what they hold finds it in the core's cache."""


# From Python 3.13 on, what an object's ``__dict__`` holds lies in the object, and the collector lists it for the object only: of
# such a dict it says that it leads nowhere.
_VALUES_IN_OBJECTS = sys.version_info >= (3, 13)


def _function_parts(function: types.FunctionType) -> list[Any]:
    return [function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__]


def _holds_meta(objects: list[Any], seen: set[int]) -> bool:
    """Follow every reference, also those that Python code cannot list (C types, closures), as the garbage collector does.

    Most of what a module holds are its dozen empty dicts of hooks, so these are told apart first and at the least expense.
    """
    tensor_types: dict[type, bool] = {}
    while objects:
        found: list[Any] = []
        contents: list[Any] = []
        for obj in objects:
            cls = type(obj)
            if cls is OrderedDict:
                if not obj:
                    found.append(obj)  # met twice it is looked at twice: attributes of its own are remembered themselves
                    continue
            elif cls in _CONTAINERS:
                if not obj:
                    continue
            elif cls in _CLOSED:
                continue
            number = id(obj)
            if number in seen:
                continue
            seen.add(number)
            is_tensor = tensor_types.get(cls)
            if is_tensor is None:
                is_tensor = tensor_types[cls] = issubclass(cls, torch.Tensor)
            if is_tensor:
                if obj.is_meta:
                    return True
            elif isinstance(obj, type):
                continue
            elif cls is types.FunctionType:
                parts = [part for part in _function_parts(obj) if part is not None and id(part) not in seen]
                seen.update(map(id, parts))
                found += parts
                continue
            elif _VALUES_IN_OBJECTS and cls is dict:
                contents += obj.values()
            found.append(obj)
        objects = gc.get_referents(*found) + contents
    return False


class LastCheck:
    """Whether a meta tensor is reachable from a module: :func:`find_meta_tensors` for a tree that is filled just now.

    It is answered at a fraction of the expense. What a module holds are nearly always a dozen empty dicts of hooks, numbers, and
    tables of modules and tensors that are known. So the collector is asked what everything that several modules hold leads to. If
    that is nothing but what is known, no single object needs to be looked at: all else, a tensor too, leads to its class or to
    its contents at least.

    Args:
        tree: All modules.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._suspects: list[Any] = []
        self._contents: list[Sequence[torch.Tensor | nn.Module | None]] = []

    def add(self, states: Sequence[dict[str, Any]], contents: Sequence[torch.Tensor | nn.Module | None]) -> None:
        """Look at some modules, which do not change any more.

        Each module of the tree must be given once. :data:`BATCH` of them at a time take the least time.

        Args:
            states: Their ``__dict__``.
            contents: What lies in their tables of parameters, of buffers and of modules, in that order: tensors that are known not
                to be on the meta device and to have no attributes, modules of the tree, and ``None``.
        """
        self._contents.append(contents)
        self._suspects += _leading_elsewhere(states, contents, self._tree)

    def finds_meta(self) -> bool:
        """The answer, when all modules were looked at."""
        suspects, tree = self._suspects, self._tree
        slotted = {cls for cls in tree.classes if cls.__basicsize__ != nn.Module.__basicsize__}
        # Besides its ``__dict__``, such a module has places that only the collector lists.
        suspects += [module for module in tree.modules if type(module) in slotted] if slotted else []
        if not suspects:
            return False
        known = {id(obj) for contents in (*self._contents, tree.modules) for obj in contents if type(obj) not in slotted}
        return _holds_meta(suspects, known)


def _leading_elsewhere(states: Sequence[dict[str, Any]], contents: Sequence[object], tree: Tree) -> list[Any]:
    """All that these modules hold if any of it leads to something that is neither known nor a plain value, else nothing."""
    held = _held(states)
    if _VALUES_IN_OBJECTS and any(type(obj) is dict and obj and not gc.get_referents(obj) for obj in held):
        return held  # the ``__dict__`` of some object
    found = gc.get_referents(*held)
    if len(found) == len(contents) and all(map(is_, found, contents)):
        return []
    known = set(map(id, contents))
    strange = [obj for obj in found if type(obj) not in ATOMIC_TYPES and id(obj) not in known]
    return [] if all(type(obj) in tree.classes for obj in strange) and tree.has(strange) else held


def _held(states: Sequence[dict[str, Any]]) -> list[Any]:
    """What lies in the ``__dict__`` of modules; keys too, if one of them is no string."""
    listed = gc.get_referents(*states)
    if not _VALUES_IN_OBJECTS:
        return listed
    values = list(chain.from_iterable(map(dict.values, states)))
    return [*values, *listed] if listed else values  # nothing is listed unless a dict has outgrown its object, or has other keys


def find_meta_tensors(root: nn.Module, limit: int = 100) -> list[str]:
    """Paths of meta tensors that are reachable from a module; empty when there is none.

    The fast answer comes from the collector's view of the heap; names are looked up only when there is something to name.
    """
    if not _holds_meta([root], set()):
        return []
    found: list[str] = []
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", root)]
    while stack and len(found) < limit:
        path, obj = stack.pop()
        if is_leaf(obj) or id(obj) in seen:
            continue
        seen.add(id(obj))
        if isinstance(obj, torch.Tensor) and obj.is_meta:
            found.append(path or "(root)")
        for kind, key, value in children(obj):
            name = f"[{key!r}]" if kind in ("key", "index") else f".{key}"
            for table in ("_parameters", "_buffers", "_modules"):
                if path.endswith(table):
                    name = f".{key}"
            stack.append((path + name, value))
    cleaned = [path.replace("._parameters", "").replace("._buffers", "").replace("._modules", "").lstrip(".") for path in found]
    return cleaned or ["(an object that cannot be named)"]
