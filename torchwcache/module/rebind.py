"""Rebind: give a module that was built on the meta device the state that a manifest describes, all of it or an error."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from torchwcache.encoding import (
    Decoder,
    Value,
    VBool,
    VDevice,
    VDType,
    VEntryDevice,
    VInt,
    VObject,
    VSize,
    VStr,
    VTensor,
    VTorchConstant,
    VTupleLike,
    VWeakref,
    decode,
)
from torchwcache.errors import EncodingError, RebindError
from torchwcache.manifest import ClassEdit, Edit, Manifest
from torchwcache.memory.base import MappedSegment
from torchwcache.module.attributes import MISSING, built_attribute
from torchwcache.module.classes import encode_class_value, tree_classes
from torchwcache.module.graph import ATOMIC_TYPES, assign, child, remove, type_name
from torchwcache.module.making import TensorMaker
from torchwcache.module.reachability import BATCH, LastCheck, find_meta_tensors
from torchwcache.module.same_build import AttributeCheck, Problem, check_tree, plain
from torchwcache.module.tree import Group, Tree

__all__ = ["RebindReport", "rebind"]

_FEW_FROZEN = 1000
"""Python 3.12 begins with some hundred frozen objects of its own. Who freezes a process that has torch in it freezes far more."""
_made_old = False
_STRANGER = object()
"""Stands for a tensor whose attributes may lead anywhere: the last check knows it of nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebindReport:
    """What a rebind did, in bytes and tensors; and the tensors that it put elsewhere than into the tables of modules."""

    mapped_nbytes: int
    copied_nbytes: int
    tensors: int
    plain: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


def rebind(
    module: nn.Module,
    manifest: Manifest,
    segments: Sequence[MappedSegment],
    *,
    device: torch.device,
    requires_grad: bool = False,
    undo: ExitStack | None = None,
) -> RebindReport:
    """Fill ``module`` in place.

    The tensors are the same whatever modes the caller is in. Made in inference mode, they could never be used outside of it, nor be
    trained; and a default device, or another function mode, has no say in where published bytes lie.

    Args:
        module: Built on the meta device in the way that ``manifest.construction`` says. After an error it must be thrown away.
        manifest: Validated against the segments (``manifest.validate``).
        segments: The mapped segments, in the manifest's order.
        device: The entry's device, as this process names it.
        requires_grad: Give parameters the ``requires_grad`` that they had when they were published; without it none requires grad.
        undo: Gets what puts back, when it is closed, what was in objects that are no modules of the tree: others may use them, too.

    Raises:
        RebindError: The module is not the one that was published, or something would be left without a value.
    """
    # Thousands of small objects are made and all of them stay: a collection in between finds nothing and costs milliseconds.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunction():
            report = _Rebinding(module, manifest, segments, device, requires_grad, ExitStack() if undo is None else undo).run()
        if was_enabled:
            _make_old()
        return report
    finally:
        if was_enabled:
            gc.enable()


def _make_old() -> None:
    """Have the collector count all there is as old: its next collection would walk through what was just made, and find nothing.

    Once in a process. It begins to count anew, and a process that attaches again and again would never have a full collection.
    """
    global _made_old
    if not _made_old and gc.get_freeze_count() < _FEW_FROZEN:  # what somebody froze would be thawed
        _made_old = True
        gc.freeze()
        gc.unfreeze()


class _Rebinding:
    def __init__(
        self,
        module: nn.Module,
        manifest: Manifest,
        segments: Sequence[MappedSegment],
        device: torch.device,
        requires_grad: bool,
        undo: ExitStack,
    ) -> None:
        self.module, self.manifest, self.segments = module, manifest, segments
        self.device, self.requires_grad, self.undo = device, requires_grad, undo
        self.problems: list[Problem] = []
        self.tree = Tree(module)
        self.groups: list[Group] = []
        self.objects: list[Any] = []
        self.tensors: TensorMaker
        self.attributed: set[int] = set()
        self.last_check = LastCheck(self.tree)
        self.plain: list[weakref.ref[torch.Tensor]] = []
        self.decoder = Decoder(self.leaf)

    def run(self) -> RebindReport:
        try:
            self.groups, problems = check_tree(self.tree, self.manifest.modules)
            self.problems += problems
            self.raise_problems()
            self.resolve_objects()
            self.raise_problems()
            self.check_attributes()
            self.raise_problems()
            classes = self.tensor_classes()
            self.tensors = TensorMaker(
                self.manifest, self.segments, device=self.device, classes=classes, requires_grad=self.requires_grad
            )
            self.apply_edits()
            self.set_tensor_attributes()
            self.fill_tables()
            self.raise_problems()
            self.apply_class_edits()
            self.raise_problems()
            self.check_completeness()
        finally:
            del self.decoder  # it holds this object: a cycle would keep every tensor until a garbage collection
        return self.report()

    def report(self) -> RebindReport:
        storages = self.manifest.storages
        copied = sum([storages.nbytes[number] for number in storages.private])
        mapped = sum(storages.nbytes) - copied
        return RebindReport(mapped_nbytes=mapped, copied_nbytes=copied, tensors=len(self.manifest.tensors), plain=self.plain)

    def check_completeness(self) -> None:
        if self.last_check.finds_meta():
            left = find_meta_tensors(self.module)
            self.problems += [(path, "is still on the meta device: the manifest has no value for it") for path in left]
            self.raise_problems()

    def raise_problems(self) -> None:
        if self.problems:
            raise RebindError(
                f"{type(self.module).__name__} as built here does not fit the cached entry {self.manifest.fingerprint}; "
                "it was not served:",
                problems=self.problems,
            )

    # ---- is it the same module? ----------------------------------------------------------------------------------------------

    def check_attributes(self) -> None:
        check = AttributeCheck()
        for group in self.groups:
            for name, values, which in group.kind.attributes:
                check.check_column(name, group.states, values, which, partial(self._module_path, group))
        for number, item in enumerate(self.manifest.objects):
            if item.attributes >= 0:
                state = getattr(self.objects[len(self.tree.modules) + number], "__dict__", {})
                check.check_object(self._object_path(number), state, self.manifest.attribute_sets[item.attributes])
        self.problems += check.problems

    def _module_path(self, group: Group, row: int) -> str:
        numbers = [number for number, kind in enumerate(self.manifest.modules.kind) if kind == group.number]
        return self.paths[numbers[row]]

    def _object_path(self, number: int) -> str:
        spec = self.manifest.objects[number]
        modules = len(self.tree.modules)
        parent = self.paths[spec.parent] if spec.parent < modules else self._object_path(spec.parent - modules)
        key = plain(spec.step.key)
        step = f".{key}" if spec.step.kind in ("attribute", "slot") else f"[{key!r}]"
        return (parent + step).lstrip(".")

    @cached_property
    def paths(self) -> list[str]:
        """For messages only."""
        return self.manifest.modules.paths()

    # ---- objects and tensors -------------------------------------------------------------------------------------------------

    def resolve_objects(self) -> None:
        self.objects = list(self.tree.modules)
        for number, spec in enumerate(self.manifest.objects):
            parent = self.objects[spec.parent]
            found: Any = MISSING
            try:
                found = child(parent, spec.step.kind, decode(spec.step.key))
            except (LookupError, EncodingError) as error:
                self.problems.append((self._object_path(number), f"is not built here: {error}"))
            if found is not MISSING and type_name(type(found)) != spec.type:
                self.problems.append((self._object_path(number), f"is a {type_name(type(found))} here, a {spec.type} in the entry"))
            self.objects.append(found)

    def tensor_classes(self) -> dict[str, type[torch.Tensor]]:
        """Classes by name. Only what is loaded already, and only tensor classes: reading a manifest imports nothing."""
        found: dict[str, type[torch.Tensor]] = {}
        for name in {kind.cls for kind in self.manifest.tensors.kinds}:
            if name in ("", "Parameter"):
                continue
            module, _, qualname = name.partition(":")
            cls: Any = sys.modules.get(module)
            for part in qualname.split("."):
                cls = getattr(cls, part, None)
            if not (isinstance(cls, type) and issubclass(cls, torch.Tensor)):
                cls = self._class_in_build(name)
            if cls is None:
                self.problems.append((name, "this tensor class does not exist in this process"))
            else:
                found[name] = cls
        self.raise_problems()
        return found

    def _class_in_build(self, name: str) -> type[torch.Tensor] | None:
        # A class made inside a function has no importable name, but the build has tensors of it.
        for module in self.tree.modules:
            for tensor in module._parameters.values():
                if tensor is not None and type_name(type(tensor)) == name:
                    return type(tensor)
        return None

    def leaf(self, node: Value) -> Any:
        """What the torch-free decoder cannot make."""
        match node:
            case VTensor():
                tensor = self.tensors[node.index]
                self.plain.append(weakref.ref(tensor))
                return tensor
            case VObject():
                return self.objects[node.index]
            case VWeakref():
                return weakref.ref(self.decoder.value(node.target))
            case VTupleLike():
                like = self.objects[node.index]
                return tuple.__new__(type(like), [self.decoder.value(item) for item in node.items])
            case VDType():
                return _torch_constant(node.name, torch.dtype)
            case VTorchConstant():
                return _torch_constant(node.name, (torch.layout, torch.memory_format))
            case VEntryDevice():
                return self.device
            case VDevice():
                return torch.device(node.name)
            case VSize():
                return torch.Size(node.dims)
        raise EncodingError(f"{type(node).__name__} has no meaning here", path="$")

    # ---- putting things in place ---------------------------------------------------------------------------------------------

    def set_tensor_attributes(self) -> None:
        """After the edits, in the order in which they were captured: an attribute may refer to a container that an edit made."""
        kinds = self.manifest.tensors.kinds
        wanted = {number for number, kind in enumerate(kinds) if kind.attributes or kind.inherited}
        if not wanted:
            return
        inheriting = {number for number, kind in enumerate(kinds) if kind.inherited}
        built = self.built_tensors(inheriting) if inheriting else {}
        for index, number in enumerate(self.manifest.tensors.kind):
            if number not in wanted:
                continue
            kind, state = kinds[number], self.tensors[index].__dict__
            for name in kind.inherited:
                theirs = built_attribute(built[index], name) if index in built else MISSING
                if theirs is not MISSING:
                    state[name] = theirs
                else:
                    self.problems.append((f"tensor {index}.{name}", "the build makes no tensor to take this attribute over from"))
            for name, value in kind.attributes:
                state[name] = self.decoder.value(value)
            if not all(type(value) in ATOMIC_TYPES for value in state.values()):
                self.attributed.add(index)

    def built_tensors(self, kinds: set[int]) -> dict[int, torch.Tensor]:
        """What the build put where each tensor of these kinds belongs: in its first place. Only before the tables are filled."""
        modules, kind_of = self.manifest.modules, self.manifest.tensors.kind
        slots = [[*kind.parameters, *[(name, column) for name, _, column in kind.buffers]] for kind in modules.kinds]
        rows = [0] * len(slots)
        found: dict[int, torch.Tensor] = {}
        for number, state in zip(modules.kind, self.tree.states, strict=True):
            row = rows[number]
            rows[number] += 1
            for name, column in slots[number]:
                index = column[row]
                if index >= 0 and kind_of[index] in kinds:
                    tensor = state["_parameters"].get(name, state["_buffers"].get(name))
                    if tensor is not None:
                        found.setdefault(index, tensor)
        return found

    def fill_tables(self) -> None:
        """After all edits: whatever they did, what lies in the tables is what the manifest says.

        From here on nothing that modules hold changes. So all that is left is done to some modules at a time, while they are in the
        core's cache: tensors are made for them, the last check looks at them.
        """
        for group in self.groups:
            kind = group.kind
            if kind.same_as:
                continue  # filled at their first path
            parameters, buffers = [name for name, _ in kind.parameters], [name for name, _, _ in kind.buffers]
            temporary = {name for name, persistent, _ in kind.buffers if not persistent}
            columns = [*[column for _, column in kind.parameters], *[column for _, _, column in kind.buffers]]
            for start in range(0, len(group.states), BATCH):
                rows = slice(start, start + BATCH)
                states, numbers = group.states[rows], [column.view[rows].tolist() for column in columns]
                tensors = list(map(self.tensors.column, numbers))
                for state in states:
                    state["training"] = kind.training
                _fill(states, "_parameters", parameters, tensors[: len(parameters)])
                _fill(states, "_buffers", buffers, tensors[len(parameters) :])
                _fill_sets(states, temporary)
                contents: list[Any] = list(zip(*self.bare(numbers, tensors), strict=True)) if columns else [()] * len(states)
                if kind.children:
                    contents = [(*row, *self.tree.inside(state)) for row, state in zip(contents, states, strict=True)]
                self.last_check.add(states, list(chain.from_iterable(contents)))

    def bare(self, numbers: Sequence[Sequence[int]], tensors: Sequence[Sequence[torch.Tensor | None]]) -> Sequence[Sequence[Any]]:
        """These tensors, but another object in place of those whose attributes may lead to something."""
        if not self.attributed:
            return tensors
        return [
            [_STRANGER if number in self.attributed else tensor for number, tensor in zip(*column, strict=True)]
            for column in zip(numbers, tensors, strict=True)
        ]

    def apply_edits(self) -> None:
        for number, edit in enumerate(self.manifest.edits):
            try:
                self.apply_edit(edit)
            except (LookupError, EncodingError, TypeError) as error:
                self.problems.append((f"edit {number}", str(error)))

    def apply_edit(self, edit: Edit) -> None:
        target = self.objects[edit.target]
        apart = edit.target >= len(self.tree.modules)
        if edit.contents:
            assert edit.value is not None
            new = self.decoder.value(edit.value)
            if apart:
                self.undo.callback(_fill_container, target, _contents(target))
            _fill_container(target, new)
            return
        step, value = edit.step, edit.value
        key = step.key.value if isinstance(step.key, VStr) else decode(step.key)
        if apart:
            self.undo.callback(_put_back, target, step.kind, key, _found(target, step.kind, key))
        if value is None:
            remove(target, step.kind, key)
        else:
            assign(target, step.kind, key, value.value if isinstance(value, (VBool, VInt)) else self.decoder.value(value))

    def apply_class_edits(self) -> None:
        if not self.manifest.class_edits:
            return
        classes = tree_classes(self.module)
        for edit in self.manifest.class_edits:
            self.apply_class_edit(classes.get(edit.cls), edit)

    def apply_class_edit(self, cls: type | None, edit: ClassEdit) -> None:
        if cls is None:
            self.problems.append((edit.cls, "this class is not in the module tree here"))
            return
        now = encode_class_value(cls.__dict__[edit.name]) if edit.name in cls.__dict__ else None
        if now == edit.after:
            return
        if now != edit.before:
            # Other models of this process may use the class: only the very change that the load made is repeated.
            self.problems.append(
                (f"class {edit.cls}.{edit.name}", "was changed in this process to something else than in the entry")
            )
        elif edit.after is None:
            delattr(cls, edit.name)
        else:
            setattr(cls, edit.name, self.decoder.value(edit.after))


def _fill_container(target: Any, contents: Any) -> None:
    target.clear()
    if isinstance(target, (dict, set)):
        target.update(contents)
    else:
        target.extend(contents)


def _contents(target: Any) -> Any:
    return dict(target) if isinstance(target, dict) else set(target) if isinstance(target, set) else list(target)


def _found(target: Any, kind: str, key: Any) -> Any:
    try:
        return child(target, kind, key)
    except LookupError:
        return MISSING


def _put_back(target: Any, kind: str, key: Any, value: Any) -> None:
    with suppress(LookupError, AttributeError):  # a place that could not be written to was not
        if value is MISSING:
            remove(target, kind, key)
        else:
            assign(target, kind, key, value)


def _fill(states: list[dict[str, Any]], table: str, names: Sequence[str], columns: Sequence[Sequence[torch.Tensor | None]]) -> None:
    """Put tensors into one table of modules of one kind: under each name what the column has for each module."""
    tables: list[dict[str, torch.Tensor | None]] = [state[table] for state in states]
    if not names and not any(tables):
        return
    if set(map(tuple, tables)) != {tuple(names)}:
        for entries in tables:
            if list(entries) != names:
                entries.clear()
    for name, column in zip(names, columns, strict=True):
        for entries, tensor in zip(tables, column, strict=True):
            # Under the key that is there: torch's own, which is found by identity. A replaced value is no change of the dict.
            entries[name] = tensor


def _fill_sets(states: list[dict[str, Any]], names: set[str]) -> None:
    """Say which buffers of these modules are not persistent."""
    if names or any(map(itemgetter("_non_persistent_buffers_set"), states)):
        for state in states:
            state["_non_persistent_buffers_set"].clear()
            state["_non_persistent_buffers_set"].update(names)


def _torch_constant(name: str, kinds: Any) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kinds):
        raise EncodingError(f"torch.{name} does not exist in this version", path="$")
    return found
