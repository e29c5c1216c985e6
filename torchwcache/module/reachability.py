"""Is anything on the meta device still reachable from a module? The last check before a module is served."""

from __future__ import annotations

import gc
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torchwcache.module.graph import ATOMIC_TYPES, children, is_leaf

__all__ = ["find_meta_tensors", "tree_holds_meta"]

# Never entered: a function's globals or a class would lead into every module that is loaded.
_CLOSED: frozenset[type] = ATOMIC_TYPES | {
    type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.GetSetDescriptorType,
    types.MappingProxyType, types.WrapperDescriptorType, types.MethodDescriptorType, torch.dtype,
}  # fmt: skip


# What these hold is what they contain, so an empty one leads nowhere. An ``OrderedDict`` may have attributes besides.
_CONTAINERS: frozenset[type] = frozenset({dict, list, set, tuple, frozenset})

_BATCH = 1000
"""So many objects are asked about at once: few enough that the second look at them finds them in the core's cache."""


def _function_parts(function: types.FunctionType) -> list[Any]:
    return [function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__]


def _holds_meta(objects: list[Any], seen: set[int]) -> bool:
    """Follow every reference, also those that Python code cannot list (C types, closures), as the garbage collector does.

    Most of what a module holds are its dozen empty dicts of hooks, so these are told apart first and at the least expense.
    """
    tensor_types: dict[type, bool] = {}
    while objects:
        found = []
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
            found.append(obj)
        objects = gc.get_referents(*found)
    return False


def tree_holds_meta(tree: Sequence[nn.Module], real: Iterable[torch.Tensor]) -> bool:
    """Whether a meta tensor is reachable from a module: :func:`find_meta_tensors` for a tree that was filled just now.

    It is answered at a fraction of the expense. What a module holds are nearly always a dozen empty dicts of hooks, numbers, and
    tables of modules and tensors that are known. So the collector is asked what everything that modules of one class hold leads to.
    If that is nothing but what is known, no single object needs to be looked at: all else, a tensor too, leads to its class or to
    its contents at least.

    Args:
        tree: Every module of the tree.
        real: Tensors that are known not to be on the meta device and to have no attributes.
    """
    known = {id(None), *map(id, tree), *map(id, real)}
    suspects: list[Any] = []
    by_class: defaultdict[type, list[Any]] = defaultdict(list)
    for module in tree:
        held = by_class[type(module)]
        held += module.__dict__.values()
        if len(held) >= _BATCH:
            suspects += _leading_elsewhere(held, known)
            held.clear()
    for held in by_class.values():
        suspects += _leading_elsewhere(held, known)
    slotted = {cls for cls in by_class if cls.__basicsize__ != nn.Module.__basicsize__}
    if slotted:  # besides its ``__dict__``, such a module has places that only the collector lists
        whole = [module for module in tree if type(module) in slotted]
        known.difference_update(map(id, whole))
        suspects += whole
    return bool(suspects) and _holds_meta(suspects, known)


def _leading_elsewhere(held: list[Any], known: set[int]) -> list[Any]:
    """All of ``held`` if any of it leads to something that is neither known nor a plain value, else nothing."""
    found = [obj for obj in gc.get_referents(*held) if id(obj) not in known and type(obj) not in ATOMIC_TYPES]
    return held.copy() if found else []


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
