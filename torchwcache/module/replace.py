"""Replace tensors everywhere a module can be seen to hold them: in tables, attributes, containers, closures, weak references."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchwcache.module.graph import HOOK_DICTS, assign, children, is_leaf

__all__ = ["iter_tensors", "replace_tensors"]


def iter_tensors(root: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Every tensor object a module holds, by ``id``, with the first path it was found at."""
    found: dict[int, tuple[str, torch.Tensor]] = {}

    def note(tensor: torch.Tensor, path: str) -> None:
        found.setdefault(id(tensor), (path, tensor))

    replace_tensors(root, note)
    return found


def replace_tensors(root: nn.Module, new: Callable[[torch.Tensor, str], torch.Tensor | None], *, hooks: bool = True) -> None:
    """Put ``new(tensor, path)`` in the place of every tensor for which it returns one.

    Args:
        root: Changed in place.
        new: Called for each place (a tensor held in two places is asked for twice, and must get the same answer to stay one).
        hooks: Also look into the hooks of modules.
    """
    _Replacing(new, hooks).inside(root, "")


class _Replacing:
    def __init__(self, new: Callable[[torch.Tensor, str], torch.Tensor | None], hooks: bool) -> None:
        self.new, self.hooks = new, hooks
        self.seen: dict[int, Any] = {}

    def inside(self, root: Any, path: str) -> None:
        """Replace what is inside an object, and inside what it holds."""
        stack = [(root, path)]
        while stack:
            obj, path = stack.pop()
            if id(obj) in self.seen:
                continue
            self.seen[id(obj)] = obj  # kept, so that its id stays its own
            for position, (kind, key, value) in enumerate(list(children(obj))):
                if not self.hooks and kind == "attribute" and key in HOOK_DICTS:
                    continue
                name = self.name(path, kind, key)
                other = self.value(value, name, stack)
                if other is not value:
                    hook = kind == "key" and path.rpartition(".")[2] in HOOK_DICTS
                    assign(obj, "hook" if hook else kind, position if hook else key, other)

    @staticmethod
    def name(path: str, kind: str, key: Any) -> str:
        if kind in ("index", "key") and not path.endswith(("_parameters", "_buffers", "_modules")):
            return f"{path}[{key!r}]"
        for table in ("_parameters", "_buffers", "_modules"):
            path = path.removesuffix(table).rstrip(".")
        return f"{path}.{key}" if path else str(key)

    def value(self, value: Any, path: str, stack: list[tuple[Any, str]]) -> Any:
        """What belongs in the place of ``value``; objects that can be changed inside go on the stack."""
        if is_leaf(value):
            return value
        if isinstance(value, torch.Tensor):
            if value.__dict__:
                stack.append((value, path))
            other = self.new(value, path)
            return value if other is None else other
        if isinstance(value, tuple):
            items = [self.value(item, f"{path}[{i}]", stack) for i, item in enumerate(value)]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return tuple.__new__(type(value), items)
        if isinstance(value, weakref.ref):
            target = value()
            if isinstance(target, torch.Tensor):
                other = self.new(target, path)
                return value if other is None else weakref.ref(other)
            if target is not None:
                stack.append((target, path))
            return value
        if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.Tensor):
            stack.append((value.__func__, path))
            other = self.new(value.__self__, path)
            return value if other is None else types.MethodType(value.__func__, other)
        stack.append((value, path))
        return value
