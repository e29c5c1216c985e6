"""Is the module that was built here the one that was published? Its tree, and what its build resolved (design D11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, TypeAlias

from torchwcache.encoding import Value, VBool, VFloat, VInt, VStr, decode
from torchwcache.errors import EncodingError
from torchwcache.manifest import Attributes, Modules
from torchwcache.module.attributes import encode_attribute
from torchwcache.module.graph import type_name
from torchwcache.module.tree import Group, Tree

__all__ = ["AttributeCheck", "Problem", "check_tree", "plain"]

Problem: TypeAlias = tuple[str, str]
"""A path, and what is wrong there."""

_MISSING = object()
_NOT_PLAIN = object()
_CHEAP = frozenset({str, int, bool, float, type(None)})
"""Types whose values are equal in tagged form if they are of one type and equal in Python; tuples of them, too, item by item.
NaN is settled the other way."""


# ---- the tree ----------------------------------------------------------------------------------------------------------------


def check_tree(tree: Tree, modules: Modules) -> tuple[list[Group], list[Problem]]:
    """Compare the tree built here with that of the entry: paths, classes, modules that have several paths.

    Returns:
        The modules by kind, and what differs; no modules if they are not the same ones.
    """
    groups = tree.groups(modules) if len(tree.states) == len(modules) else []
    if tree.named or modules.named or not groups or not _same_children(tree, modules):
        mine, theirs = tree.paths(), modules.paths()
        if mine != theirs:
            return [], _differing_paths(mine, theirs)
    return groups, [*_differing_classes(tree, modules), *_differing_sharing(tree, modules)]


def _same_children(tree: Tree, modules: Modules) -> bool:
    """Whether all modules have the children that their kind has, and so, all in all, the same paths."""
    names = [kind.children for kind in modules.kinds]
    theirs = [names[modules.kind[number]] for number, _, _ in tree.parents]
    mine = [inside for _, inside, _ in tree.parents]
    if mine != theirs:
        mine = [tuple(compress(inside, [child is not None for child in children])) for _, inside, children in tree.parents]
    return mine == theirs and sum(map(bool, mine)) == sum(map(bool, map(names.__getitem__, modules.kind)))


def _differing_paths(mine: Sequence[str], theirs: Sequence[str]) -> list[Problem]:
    problems = [(path or "(root)", "is built here, but not in the entry") for path in sorted({*mine} - {*theirs})]
    problems += [(path or "(root)", "is in the entry, but not built here") for path in sorted({*theirs} - {*mine})]
    return problems or [("(root)", "the modules come in another order than in the entry")]


def _differing_classes(tree: Tree, modules: Modules) -> list[Problem]:
    names = {cls: type_name(cls) for cls in tree.classes}
    pairs = set(zip(tree.types, modules.kind, strict=True))  # few: the layers of a model are alike
    if all(names[cls] == modules.kinds[kind].cls for cls, kind in pairs):
        return []
    return [
        (spec.path or "(root)", f"is a {names[type(module)]} here, a {spec.cls} in the entry")
        for module, spec in zip(tree.modules, modules, strict=True)
        if names[type(module)] != spec.cls
    ]


def _differing_sharing(tree: Tree, modules: Modules) -> list[Problem]:
    if tree.distinct == len(tree.modules) and not any(kind.same_as for kind in modules.kinds):
        return []  # no module has two paths
    problems: list[Problem] = []
    first: dict[int, int] = {}
    for number, (module, spec) in enumerate(zip(tree.modules, modules, strict=True)):
        if first.setdefault(id(module), number) != (spec.same_as if spec.same_as >= 0 else number):
            problems.append((spec.path, "shares its module with another path in only one of the two"))
    return problems


# ---- what the build resolved -------------------------------------------------------------------------------------------------


def plain(value: Value) -> Any:
    """A value that needs neither torch nor the module; else something that is equal to nothing."""
    if isinstance(value, (VBool, VInt, VFloat, VStr)):  # nearly all of them
        return value.value
    try:
        return decode(value)
    except EncodingError:
        return _NOT_PLAIN


class AttributeCheck:
    """What the build resolved here must be what it resolved in the producer (design D11).

    Attributes:
        problems: What was found so far.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def check_object(self, path: str, state: dict[str, Any], expected: Attributes) -> None:
        """Compare what one object holds."""
        for name, value in expected:
            mine = state.get(name, _MISSING)
            if not _equal(mine, plain(value)) and not _same(mine, value):
                self._differs(path, name, mine, value)

    def check_column(
        self,
        name: str,
        states: Sequence[dict[str, Any]],
        values: Sequence[Value],
        which: Sequence[int],
        path_of: Callable[[int], str],
    ) -> None:
        """Compare what several objects hold under one name.

        Args:
            name: Of the attribute.
            states: The ``__dict__`` of each object.
            values: What is expected there.
            which: The number of the value of each object; empty if there is but one.
            path_of: Gives the path of an object, by its place among them.
        """
        mine, expected = [state.get(name, _MISSING) for state in states], [plain(value) for value in values]
        if _all_equal(mine, [expected[number] for number in which] or expected):
            return
        settled: dict[tuple[int, int], bool] = {}  # one object that many hold is looked at once
        for row, (value, number) in enumerate(zip(mine, which or [0] * len(mine), strict=True)):
            same = settled.get((id(value), number))
            if same is None:
                same = settled[id(value), number] = _equal(value, expected[number]) or _same(value, values[number])
            if not same:
                self._differs(path_of(row), name, value, values[number])

    def _differs(self, path: str, name: str, mine: Any, expected: Value) -> None:
        reason = "is missing here" if mine is _MISSING else f"is {mine!r} here, {_show(expected)} in the entry"
        self.problems.append((f"{path}.{name}" if path else name, reason))


def _all_equal(values: list[Any], expected: list[Any]) -> bool:
    """Whether all values are the only one that is expected, or each its own, as far as a cheap test of them all can tell."""
    kinds = set(map(type, expected))
    if not kinds <= _CHEAP:
        return False
    if len(expected) == 1:  # types first: True is 1
        return set(map(type, values)) == kinds and values.count(expected[0]) == len(values)
    return list(map(type, values)) == list(map(type, expected)) and values == expected


def _equal(mine: Any, expected: Any) -> bool:
    """Whether a value is equal to a plain one, as far as a cheap test can tell."""
    kind = type(mine)
    if kind is not type(expected):
        return False
    if kind is not tuple:
        return kind in _CHEAP and bool(mine == expected)
    kinds = list(map(type, mine))
    # Types first here, too: what a tensor is equal to is another tensor.
    return all(kind in _CHEAP for kind in kinds) and kinds == list(map(type, expected)) and bool(mine == expected)


def _same(mine: Any, expected: Value) -> bool:
    """Whether a value is what was published; what the cheap tests could not settle: containers, NaN, a difference."""
    if mine is _MISSING:
        return False
    try:
        tagged = encode_attribute(mine)
    except EncodingError:
        return False
    return tagged == expected or repr(tagged) == repr(expected)


def _show(value: Value) -> str:
    try:
        return repr(decode(value, leaf=lambda node: node))
    except EncodingError:
        return repr(value)
