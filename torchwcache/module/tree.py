"""The modules of a tree as it was built here, sorted by the kinds of module that a manifest has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from torchwcache.manifest import ModuleKind, Modules

__all__ = ["Group", "Tree"]


@dataclass(frozen=True, slots=True)
class Group:
    """Everything that the modules of one kind hold: their ``__dict__``, in the order of the tree."""

    number: int
    kind: ModuleKind
    states: list[dict[str, Any]]


class Tree:
    """The modules below ``root`` and their ``__dict__``, in ``named_modules(remove_duplicate=False)`` order.

    Attributes:
        root: The module that was built.
        modules: Every module; one that has several paths comes several times.
        states: The ``__dict__`` of each.
        named: Whether a class names its modules in a way of its own.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules: list[nn.Module] = []
        self.states: list[dict[str, Any]] = []
        _walk(root, self.modules, self.states)  # torch's own takes every module through a generator for each level above it
        self.classes: set[type[nn.Module]] = set(map(type, self.modules))
        self.named = any(cls.named_modules is not nn.Module.named_modules for cls in self.classes)
        if self.named:
            self.modules = [module for _, module in root.named_modules(remove_duplicate=False)]
            self.states = [module.__dict__ for module in self.modules]

    @cached_property
    def ids(self) -> set[int]:
        """``id`` of every module."""
        return set(map(id, self.modules))

    def paths(self) -> list[str]:
        """The path of every module, made anew."""
        return [path for path, _ in self.root.named_modules(remove_duplicate=False)]

    def groups(self, modules: Modules) -> list[Group]:
        """What this tree has of each kind. It must have as many modules as the manifest."""
        found: list[list[dict[str, Any]]] = [[] for _ in modules.kinds]
        for kind, state in zip(modules.kind, self.states, strict=True):
            found[kind].append(state)
        return [Group(i, kind, states) for i, (kind, states) in enumerate(zip(modules.kinds, found, strict=True))]


def _walk(module: nn.Module, modules: list[nn.Module], states: list[dict[str, Any]]) -> None:
    state = module.__dict__
    modules.append(module)
    states.append(state)
    children = state.get("_modules")
    if children:
        for child in children.values():
            if child is not None:
                _walk(child, modules, states)
