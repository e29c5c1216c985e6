"""The modules of a tree as it was built here, sorted by the kinds of module that a manifest has."""

from __future__ import annotations

from collections.abc import Iterable
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

    What is asked of every module later is noted when it is met: a hundred thousand modules are more than a core's cache holds, and
    to go there again takes longer than what is done there.

    Attributes:
        root: The module that was built.
        modules: Every module; one that has several paths comes several times.
        types: The class of each.
        states: The ``__dict__`` of each.
        parents: The number of each module that has modules inside, their names, and the modules.
        named: Whether a class names its modules in a way of its own.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules: list[nn.Module] = []
        self.types: list[type[nn.Module]] = []
        self.states: list[dict[str, Any]] = []
        self.parents: list[tuple[int, tuple[str, ...], tuple[nn.Module | None, ...]]] = []
        self._walk((root,), deep=True)  # torch's own takes every module through a generator for each level above it
        self.named = any(cls.named_modules is not nn.Module.named_modules for cls in set(self.types))
        if self.named:
            for noted in (self.modules, self.types, self.states, self.parents):
                noted.clear()
            self._walk([module for _, module in root.named_modules(remove_duplicate=False)], deep=False)

    def _walk(self, modules: Iterable[nn.Module | None], *, deep: bool) -> None:
        for module in modules:
            if module is None:
                continue
            state = module.__dict__
            children = state.get("_modules")
            if children:
                self.parents.append((len(self.modules), tuple(children), tuple(children.values())))
            self.modules.append(module)
            self.types.append(type(module))
            self.states.append(state)
            if children and deep:
                self._walk(children.values(), deep=True)

    @cached_property
    def classes(self) -> set[type[nn.Module]]:
        """Every class of a module."""
        return set(self.types)

    @cached_property
    def _known_by_id(self) -> bool:
        """Whether there are classes of modules that have a say in whether two of them are equal."""
        return any(cls.__eq__ is not object.__eq__ or cls.__hash__ is not object.__hash__ for cls in self.classes)

    @cached_property
    def _distinct(self) -> set[Any]:
        # Numbers for a hundred thousand modules are objects, too, and take several times as long to make as the set of modules.
        return set(map(id, self.modules)) if self._known_by_id else set(self.modules)

    @cached_property
    def _inside(self) -> dict[int, tuple[nn.Module | None, ...]]:
        return {} if self.named else {id(self.states[number]): modules for number, _, modules in self.parents}

    def inside(self, state: dict[str, Any]) -> tuple[nn.Module | None, ...]:
        """The modules of the tree that were inside the module with this ``__dict__``, and ``None``, when it was walked through."""
        return self._inside.get(id(state), ())

    @property
    def distinct(self) -> int:
        """How many modules there are, each one counted once."""
        return len(self._distinct)

    def has(self, modules: Iterable[nn.Module]) -> bool:
        """Whether all of these modules are in the tree."""
        return self._distinct.issuperset(map(id, modules) if self._known_by_id else modules)

    def paths(self) -> list[str]:
        """The path of every module, made anew."""
        return [path for path, _ in self.root.named_modules(remove_duplicate=False)]

    def groups(self, modules: Modules) -> list[Group]:
        """What this tree has of each kind. It must have as many modules as the manifest."""
        found: list[list[dict[str, Any]]] = [[] for _ in modules.kinds]
        for kind, state in zip(modules.kind, self.states, strict=True):
            found[kind].append(state)
        return [Group(i, kind, states) for i, (kind, states) in enumerate(zip(modules.kinds, found, strict=True))]
