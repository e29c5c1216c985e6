"""Is the module that was built here the one that was published? Its tree, and what its build resolved (design D11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn

from torchwcache.encoding import Value, VBool, VFloat, VInt, VStr, decode
from torchwcache.errors import EncodingError
from torchwcache.manifest import Manifest, ModuleSpec
from torchwcache.module.attributes import encode_attribute
from torchwcache.module.graph import type_name

__all__ = ["AttributeCheck", "Problem", "check_tree", "named_tree", "plain"]

Problem: TypeAlias = tuple[str, str]
"""A path, and what is wrong there."""

_MISSING = object()
_NOT_PLAIN = object()
_CHEAP = (str, int, bool, float)
"""Types whose values are equal in tagged form if they are of one type and equal in Python; tuples of them, too, item by item.
NaN is settled the other way."""


def named_tree(root: nn.Module) -> tuple[list[str], list[nn.Module]]:
    """Paths and modules as ``root.named_modules(remove_duplicate=False)`` gives them.

    That passes every module through one generator for each level above it, which is most of what it costs.
    """
    paths: list[str] = []
    tree: list[nn.Module] = []
    _walk(root, "", paths, tree)
    classes: set[type[nn.Module]] = {type(module) for module in tree}
    if any(cls.named_modules is not nn.Module.named_modules for cls in classes):
        named = list(root.named_modules(remove_duplicate=False))
        return [path for path, _ in named], [module for _, module in named]
    return paths, tree


def _walk(module: nn.Module, path: str, paths: list[str], tree: list[nn.Module]) -> None:
    paths.append(path)
    tree.append(module)
    children = module._modules
    if children:
        prefix = f"{path}." if path else ""
        for name, child in children.items():
            if child is not None:
                _walk(child, prefix + name, paths, tree)


def check_tree(paths: Sequence[str], tree: Sequence[nn.Module], specs: Sequence[ModuleSpec]) -> list[Problem]:
    """What differs between the tree built here and that of the entry: paths, classes, modules that have several paths."""
    if paths != [spec.path for spec in specs]:
        return _check_paths(paths, specs)
    problems: list[Problem] = []
    names = {cls: type_name(cls) for cls in set(map(type, tree))}
    if [names[type(module)] for module in tree] != [spec.cls for spec in specs]:
        for module, spec in zip(tree, specs, strict=True):
            name = names[type(module)]
            if name != spec.cls:
                problems.append((spec.path or "(root)", f"is a {name} here, a {spec.cls} in the entry"))
    if len(set(map(id, tree))) == len(tree) and all(spec.same_as < 0 for spec in specs):
        return problems  # no module has two paths
    first: dict[int, int] = {}
    for number, (module, spec) in enumerate(zip(tree, specs, strict=True)):
        if first.setdefault(id(module), number) != (spec.same_as if spec.same_as >= 0 else number):
            problems.append((spec.path, "shares its module with another path in only one of the two"))
    return problems


def _check_paths(paths: Sequence[str], specs: Sequence[ModuleSpec]) -> list[Problem]:
    mine, theirs = set(paths), {spec.path for spec in specs}
    problems = [(path or "(root)", "is built here, but not in the entry") for path in sorted(mine - theirs)]
    problems += [(path or "(root)", "is in the entry, but not built here") for path in sorted(theirs - mine)]
    return problems or [("(root)", "the modules come in another order than in the entry")]


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

    def __init__(self, manifest: Manifest) -> None:
        self.problems: list[Problem] = []
        self._expected = [dict(entry) for entry in manifest.attribute_sets]
        # With the type, so that the loop over modules compares and does nothing else; None is what it is or it is not.
        self._sets: list[list[tuple[str, Any, type | None]]] = []
        for entry in manifest.attribute_sets:
            values = [(name, plain(value)) for name, value in entry]
            self._sets.append([(name, value, type(value) if _is_cheap(value) else None) for name, value in values])

    def check_modules(self, tree: Sequence[nn.Module], specs: Sequence[ModuleSpec]) -> None:
        """Compare each module with its set."""
        for module, spec in zip(tree, specs, strict=True):
            if spec.attributes >= 0:
                self.check(spec.path, module.__dict__, spec.attributes)

    def check(self, path: str, state: dict[str, Any], number: int) -> None:
        """Compare what one object holds with set ``number``."""
        for name, value, kind in self._sets[number]:
            mine = state.get(name, _MISSING)
            # The cheap test first; only what it cannot settle (containers, NaN, a difference) is put into tagged form.
            if mine is value or (type(mine) is kind and (_equal_tuples(mine, value) if kind is tuple else mine == value)):
                continue
            self._compare(f"{path}.{name}" if path else name, mine, self._expected[number][name])

    def _compare(self, path: str, mine: Any, expected: Value) -> None:
        if mine is _MISSING:
            self.problems.append((path, "is missing here"))
            return
        try:
            tagged = encode_attribute(mine)
            same = tagged == expected or repr(tagged) == repr(expected)
        except EncodingError:
            same = False
        if not same:
            self.problems.append((path, f"is {mine!r} here, {_show(expected)} in the entry"))


def _is_cheap(value: Any) -> bool:
    return type(value) in _CHEAP or (type(value) is tuple and all(type(item) in _CHEAP for item in value))


def _equal_tuples(mine: Any, value: tuple[Any, ...]) -> bool:
    return list(map(type, mine)) == list(map(type, value)) and bool(mine == value)  # types first: True is 1, a tensor neither


def _show(value: Value) -> str:
    try:
        return repr(decode(value, leaf=lambda node: node))
    except EncodingError:
        return repr(value)
