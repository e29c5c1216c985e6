"""Rebind: give a module that was built on the meta device the state that a manifest describes, all of it or an error."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from torchwcache.module.classes import encode_class_value, tree_classes
from torchwcache.module.graph import ATOMIC_TYPES, assign, child, remove, type_name
from torchwcache.module.making import make_tensors
from torchwcache.module.reachability import find_meta_tensors, tree_holds_meta
from torchwcache.module.same_build import AttributeCheck, Problem, check_tree, named_tree, plain

__all__ = ["RebindReport", "rebind"]

_MISSING = object()


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

    Raises:
        RebindError: The module is not the one that was published, or something would be left without a value.
    """
    # Thousands of small objects are made and all of them stay: a collection in between finds nothing and costs milliseconds.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunction():
            return _Rebinding(module, manifest, segments, device, requires_grad).run()
    finally:
        if was_enabled:
            gc.enable()


class _Rebinding:
    def __init__(
        self, module: nn.Module, manifest: Manifest, segments: Sequence[MappedSegment], device: torch.device, requires_grad: bool
    ) -> None:
        self.module, self.manifest, self.segments = module, manifest, segments
        self.device, self.requires_grad = device, requires_grad
        self.problems: list[Problem] = []
        self.paths, self.tree = named_tree(module)
        self.objects: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.attributed: set[int] = set()
        self.plain: list[weakref.ref[torch.Tensor]] = []
        self.decoder = Decoder(self.leaf)

    def run(self) -> RebindReport:
        try:
            self.problems += check_tree(self.paths, self.tree, self.manifest.modules)
            self.raise_problems()
            self.resolve_objects()
            self.raise_problems()
            self.check_attributes()
            self.raise_problems()
            classes = self.tensor_classes()
            self.tensors = make_tensors(
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
        mapped = sum([spec.nbytes for spec in storages if spec.shared])
        copied = sum([spec.nbytes for spec in storages if not spec.shared])
        return RebindReport(mapped_nbytes=mapped, copied_nbytes=copied, tensors=len(self.tensors), plain=self.plain)

    def check_completeness(self) -> None:
        bare = self.tensors
        if self.attributed:
            bare = [tensor for number, tensor in enumerate(bare) if number not in self.attributed]
        if tree_holds_meta(self.tree, bare):
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
        check = AttributeCheck(self.manifest)
        check.check_modules(self.tree, self.manifest.modules)
        for number, item in enumerate(self.manifest.objects):
            if item.attributes >= 0:
                state = getattr(self.objects[len(self.tree) + number], "__dict__", {})
                check.check(self._object_path(number), state, item.attributes)
        self.problems += check.problems

    def _object_path(self, number: int) -> str:
        spec = self.manifest.objects[number]
        modules = len(self.tree)
        parent = self.manifest.modules[spec.parent].path if spec.parent < modules else self._object_path(spec.parent - modules)
        key = plain(spec.step.key)
        step = f".{key}" if spec.step.kind in ("attribute", "slot") else f"[{key!r}]"
        return (parent + step).lstrip(".")

    # ---- objects and tensors -------------------------------------------------------------------------------------------------

    def resolve_objects(self) -> None:
        self.objects = list(self.tree)
        for number, spec in enumerate(self.manifest.objects):
            parent = self.objects[spec.parent]
            found: Any = _MISSING
            try:
                found = child(parent, spec.step.kind, decode(spec.step.key))
            except (LookupError, EncodingError) as error:
                self.problems.append((self._object_path(number), f"is not built here: {error}"))
            if found is not _MISSING and type_name(type(found)) != spec.type:
                self.problems.append((self._object_path(number), f"is a {type_name(type(found))} here, a {spec.type} in the entry"))
            self.objects.append(found)

    def tensor_classes(self) -> dict[str, type[torch.Tensor]]:
        """Classes by name. Only what is loaded already, and only tensor classes: reading a manifest imports nothing."""
        found: dict[str, type[torch.Tensor]] = {}
        for name in {spec.cls for spec in self.manifest.tensors}:
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
        for module in self.tree:
            for tensor in module._parameters.values():
                if tensor is not None and type_name(type(tensor)) == name:
                    return type(tensor)
        return None

    def leaf(self, node: Value) -> Any:
        """What the torch-free decoder cannot make."""
        match node:
            case VTensor():
                self.plain.append(weakref.ref(self.tensors[node.index]))
                return self.tensors[node.index]
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
        specs = self.manifest.tensors
        inherited = {index for index, spec in enumerate(specs) if spec.inherited}
        built = self.built_tensors(inherited) if inherited else {}
        for index in sorted(inherited.union([index for index, spec in enumerate(specs) if spec.attributes])):
            spec = specs[index]
            state = self.tensors[index].__dict__
            for name in spec.inherited:
                if name in (theirs := built[index].__dict__ if index in built else {}):
                    state[name] = theirs[name]
                else:
                    self.problems.append((f"tensor {index}.{name}", "the build makes no tensor to take this attribute over from"))
            for name, value in spec.attributes:
                state[name] = self.decoder.value(value)
            if not all(type(value) in ATOMIC_TYPES for value in state.values()):
                self.attributed.add(index)

    def built_tensors(self, wanted: set[int]) -> dict[int, torch.Tensor]:
        """What the build put where these tensors belong: in the first place of each. Only before the tables are filled."""
        found: dict[int, torch.Tensor] = {}
        for module, spec in zip(self.tree, self.manifest.modules, strict=True):
            if spec.same_as >= 0:
                continue
            buffers = [(name, index) for name, index, _ in spec.buffers]
            for name, index in (*spec.parameters, *buffers):
                tensor = module._parameters.get(name, module._buffers.get(name))
                if index in wanted and tensor is not None:
                    found.setdefault(index, tensor)
        return found

    def fill_tables(self) -> None:
        """After all edits: whatever they did, what lies in the tables is what the manifest says."""
        tensors = self.tensors
        for module, spec in zip(self.tree, self.manifest.modules, strict=True):
            if spec.same_as >= 0:
                continue
            state = module.__dict__
            state["training"] = spec.training
            entries, table = spec.parameters, state["_parameters"]
            if entries or table:
                _fill(table, entries, tensors)
            buffers, table, transient = spec.buffers, state["_buffers"], state["_non_persistent_buffers_set"]
            if buffers or table or transient:
                _fill(table, [(name, index) for name, index, _ in buffers], tensors)
                transient.clear()
                transient.update(name for name, _, persistent in buffers if not persistent)

    def apply_edits(self) -> None:
        for number, edit in enumerate(self.manifest.edits):
            try:
                self.apply_edit(edit)
            except (LookupError, EncodingError, TypeError) as error:
                self.problems.append((f"edit {number}", str(error)))

    def apply_edit(self, edit: Edit) -> None:
        target = self.objects[edit.target]
        if edit.contents:
            assert edit.value is not None
            new = self.decoder.value(edit.value)
            target.clear()
            if isinstance(target, (dict, set)):
                target.update(new)
            else:
                target.extend(new)
            return
        step, value = edit.step, edit.value
        key = step.key.value if isinstance(step.key, VStr) else decode(step.key)
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


def _fill(table: dict[str, torch.Tensor | None], entries: Sequence[tuple[str, int | None]], tensors: list[torch.Tensor]) -> None:
    if len(table) == len(entries):
        for key, (name, index) in zip(table, entries):  # noqa: B905 - checked, and this runs once a module
            if key != name:
                break
            # Under the key that is there: torch's own, which is found by identity. A replaced value is no change of the dict.
            table[key] = None if index is None else tensors[index]
        else:
            return
    table.clear()
    for name, index in entries:
        table[name] = None if index is None else tensors[index]


def _torch_constant(name: str, kinds: Any) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kinds):
        raise EncodingError(f"torch.{name} does not exist in this version", path="$")
    return found
