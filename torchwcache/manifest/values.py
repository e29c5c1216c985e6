"""What of a module state is not a tensor: steps, objects, and the edits that make a module as built the one that was loaded."""

from __future__ import annotations

from typing import Literal

import msgspec

from torchwcache.encoding import Value

__all__ = ["ClassEdit", "Edit", "ObjectSpec", "Spec", "Step", "StepKind"]

StepKind = Literal[
    "attribute", "slot", "index", "key", "cell", "default", "kwdefault", "partial_arg", "partial_keyword", "function", "self",
    "weakref", "hook", "tensor_attribute",
]  # fmt: skip
"""How one object is reached from another.

``attribute``/``slot``: by name; ``index``: in a list, tuple or deque; ``key``: in a mapping; ``cell``, ``default``, ``kwdefault``:
of a function; ``partial_arg``, ``partial_keyword``: of a ``functools.partial``; ``function``, ``self``: of a bound method or
partial; ``weakref``: what a weak reference points to; ``hook``: in a module's hook dict by position; ``tensor_attribute``: in the
``__dict__`` of a tensor.
"""


class Spec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Part of a manifest."""


class Step(Spec, frozen=True):
    """One step from an object to what it holds."""

    kind: StepKind
    key: Value


class ObjectSpec(Spec, frozen=True):
    """An object of the module as built, reached by ``step`` from ``parent``.

    Objects ``0 .. len(modules) - 1`` are the modules themselves; an ``ObjectSpec`` number ``i`` is object ``len(modules) + i``,
    and its parent comes before it. ``type`` (``"module:qualname"``) is checked when it is resolved. ``attributes`` is an index into
    ``Manifest.attribute_sets``, or -1.
    """

    parent: int
    step: Step
    type: str
    attributes: int = -1


class Edit(Spec, frozen=True):
    """A difference between the module as built on meta and as loaded: set (or delete, when ``value`` is ``None``) one place.

    ``contents`` edits replace everything inside a list, dict, set or deque at once; ``step.key`` is then unused.
    """

    target: int
    step: Step
    value: Value | None
    contents: bool = False


class ClassEdit(Spec, frozen=True):
    """A class attribute that the load changed, with its value before and after."""

    cls: str
    name: str
    before: Value | None
    after: Value | None
