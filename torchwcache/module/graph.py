"""The object graph around a module: what an object holds, and how to put something else in its place.

One vocabulary of steps (``manifest.StepKind``) serves everything that walks a module: capture pairs two graphs along it, a rebind
resolves and assigns places by it, materializing and detaching replace every tensor along it.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = [
    "ATOMIC_TYPES",
    "HOOK_DICTS",
    "MODULE_TABLES",
    "assign",
    "child",
    "children",
    "is_leaf",
    "remove",
    "type_name",
]

ATOMIC_TYPES = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented),
        torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.finfo, torch.iinfo,
    }
)  # fmt: skip
"""Types whose values hold no other objects that a load could change."""

MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})
"""What a module of the tree keeps in its ``__dict__`` and the manifest keeps in tables of its own."""

HOOK_DICTS = frozenset(
    {
        "_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
        "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    }
)  # fmt: skip
"""Dicts of hooks: their keys come from a counter of the process, so their entries are known by position."""

_SHARED_BY_NATURE = (type, types.ModuleType, types.BuiltinFunctionType, types.GetSetDescriptorType, types.CodeType)


def is_leaf(obj: object) -> bool:
    """Whether an object holds nothing that needs walking: a plain value, a class, a builtin."""
    return type(obj) in ATOMIC_TYPES or isinstance(obj, _SHARED_BY_NATURE)


def type_name(cls: type) -> str:
    """``"module:qualname"``. A spawned child runs the script as ``__mp_main__``; it is the same script."""
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}:{cls.__qualname__}"


def _slot_names(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _slot(obj: Any, name: str) -> Any:
    """The descriptor of a slot.

    It reads past a property under the same name, which may do anything, and writes past any ``__setattr__``, also that of a frozen
    class that is written in C.
    """
    for base in type(obj).__mro__:
        found = base.__dict__.get(name)
        if isinstance(found, types.MemberDescriptorType):
            return found
    raise LookupError(f"no slot {name!r} in {type_name(type(obj))}")


def _attributes(obj: Any) -> Iterator[tuple[str, Any, Any]]:
    state = getattr(obj, "__dict__", None)
    if isinstance(state, dict):
        for name, value in list(state.items()):
            yield "attribute", name, value
    if not isinstance(obj, (torch.Tensor, types.FunctionType)):
        for name in _slot_names(type(obj)):
            try:
                yield "slot", name, _slot(obj, name).__get__(obj)
            except (AttributeError, LookupError):
                continue  # a slot that was never filled, or that is none any more


def _function_parts(obj: types.FunctionType) -> Iterator[tuple[str, Any, Any]]:
    for i, cell in enumerate(obj.__closure__ or ()):
        try:
            yield "cell", i, cell.cell_contents
        except ValueError:
            continue  # a cell that is still empty
    for i, value in enumerate(obj.__defaults__ or ()):
        yield "default", i, value
    for name, value in (obj.__kwdefaults__ or {}).items():
        yield "kwdefault", name, value


def children(obj: Any) -> Iterator[tuple[str, Any, Any]]:
    """What an object holds: ``(step kind, key, child)``. A tensor's own ``__dict__`` counts, its data does not.

    For a module everything in its ``__dict__`` is listed, tables included; callers that treat tables apart skip
    :data:`MODULE_TABLES`.
    """
    if is_leaf(obj):
        return
    if isinstance(obj, dict):
        for key, value in list(obj.items()):
            yield "key", key, value
    elif isinstance(obj, (list, tuple, deque)):
        for i, value in enumerate(list(obj)):
            yield "index", i, value
    elif isinstance(obj, types.FunctionType):
        yield from _function_parts(obj)
    elif isinstance(obj, types.MethodType):
        yield "function", None, obj.__func__
        yield "self", None, obj.__self__
        return
    elif isinstance(obj, functools.partial):
        yield "function", None, obj.func
        for i, value in enumerate(obj.args):
            yield "partial_arg", i, value
        for name, value in obj.keywords.items():
            yield "partial_keyword", name, value
    elif isinstance(obj, weakref.ref):
        target = obj()
        if target is not None:
            yield "weakref", None, target
        return
    for kind, name, value in _attributes(obj):
        yield ("tensor_attribute" if isinstance(obj, torch.Tensor) else kind), name, value


def child(obj: Any, kind: str, key: Any) -> Any:
    """Follow one step.

    Raises:
        LookupError: There is nothing there.
    """
    try:
        match kind:
            case "attribute" | "tensor_attribute":
                return obj.__dict__[key]
            case "slot":
                return _slot(obj, key).__get__(obj)
            case "index" | "key":
                return obj[key]
            case "hook":
                return list(obj.values())[key]
            case "cell":
                return obj.__closure__[key].cell_contents
            case "default":
                return obj.__defaults__[key]
            case "kwdefault":
                return obj.__kwdefaults__[key]
            case "partial_arg":
                return obj.args[key]
            case "partial_keyword":
                return obj.keywords[key]
            case "function":
                return obj.func if isinstance(obj, functools.partial) else obj.__func__
            case "self":
                return obj.__self__
            case "weakref":
                return obj()
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise LookupError(f"no {kind} {key!r} in {type_name(type(obj))}") from error
    raise LookupError(f"unknown step {kind!r}")


def assign(obj: Any, kind: str, key: Any, value: Any) -> None:
    """Put ``value`` in the place that :func:`child` reads.

    Raises:
        LookupError: The place cannot be written (an item of a tuple: replace the tuple instead).
    """
    match kind:
        case "attribute":
            if isinstance(obj, nn.Module) or hasattr(obj, "__dict__"):
                obj.__dict__[key] = value  # past any __setattr__: a module would register, a frozen dataclass refuse
                return
        case "tensor_attribute":
            obj.__dict__[key] = value
            return
        case "slot":
            _slot(obj, key).__set__(obj, value)
            return
        case "index" if isinstance(obj, (list, deque)):
            obj[key] = value
            return
        case "key":
            _dict_class(obj).__setitem__(obj, key, value)
            return
        case "hook":
            _dict_class(obj).__setitem__(obj, list(obj)[key], value)
            return
        case "cell":
            obj.__closure__[key].cell_contents = value
            return
        case "default":
            obj.__defaults__ = (*obj.__defaults__[:key], value, *obj.__defaults__[key + 1 :])
            return
        case "kwdefault":
            obj.__kwdefaults__[key] = value
            return
        case "partial_arg" | "partial_keyword":
            _assign_partial(obj, kind, key, value)
            return
    raise LookupError(f"{kind} {key!r} of {type_name(type(obj))} cannot be replaced")


def _dict_class(obj: Any) -> Any:
    """The builtin whose methods change ``obj`` without running code of a subclass."""
    return OrderedDict if isinstance(obj, OrderedDict) else dict


def _assign_partial(obj: functools.partial[Any], kind: str, key: Any, value: Any) -> None:
    args, keywords = list(obj.args), dict(obj.keywords)
    if kind == "partial_arg":
        args[key] = value
    else:
        keywords[key] = value
    # A partial has no setters; its pickling hook is the one public way to change it in place.
    obj.__setstate__((obj.func, tuple(args), keywords, obj.__dict__))  # type: ignore[attr-defined]


def remove(obj: Any, kind: str, key: Any) -> None:
    """Empty a place: an attribute, a slot, an item of a dict.

    Raises:
        LookupError: Such a place cannot be emptied.
    """
    match kind:
        case "attribute" | "tensor_attribute":
            obj.__dict__.pop(key, None)
        case "slot":
            _slot(obj, key).__delete__(obj)
        case "key":
            _dict_class(obj).pop(obj, key, None)
        case _:
            raise LookupError(f"{kind} {key!r} of {type_name(type(obj))} cannot be removed")
