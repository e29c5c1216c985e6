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
    VDevice,
    VDType,
    VEntryDevice,
    VObject,
    VSize,
    VTensor,
    VTorchConstant,
    VTupleLike,
    VWeakref,
    decode,
)
from torchwcache.errors import EncodingError, RebindError
from torchwcache.manifest import ClassEdit, Edit, Manifest, TensorSpec
from torchwcache.memory.base import MappedSegment
from torchwcache.module.attributes import encode_attribute
from torchwcache.module.classes import encode_class_value, tree_classes
from torchwcache.module.graph import assign, child, remove, type_name
from torchwcache.module.reachability import find_meta_tensors
from torchwcache.module.storages import view_storage

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

    Args:
        module: Built on the meta device in the way that ``manifest.construction`` says. After an error it must be thrown away.
        manifest: Validated against the segments (``manifest.validate``).
        segments: The mapped segments, in the manifest's order.
        device: The entry's device, as this process names it.
        requires_grad: Give parameters the ``requires_grad`` that they had when they were published; without it none requires grad.

    Raises:
        RebindError: The module is not the one that was published, or something would be left without a value.
    """
    return _Rebinding(module, manifest, segments, device, requires_grad).run()


class _Rebinding:
    def __init__(
        self, module: nn.Module, manifest: Manifest, segments: Sequence[MappedSegment], device: torch.device, requires_grad: bool
    ) -> None:
        self.module, self.manifest, self.segments = module, manifest, segments
        self.device, self.requires_grad = device, requires_grad
        self.problems: list[tuple[str, str]] = []
        self.named = list(module.named_modules(remove_duplicate=False))
        self.tree = [item for _, item in self.named]
        self.objects: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.plain: list[weakref.ref[torch.Tensor]] = []
        self.decoder = Decoder(self.leaf)

    def run(self) -> RebindReport:
        # Thousands of small objects are made and all of them stay: a collection in between finds nothing and costs milliseconds.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self.check_tree()
            self.raise_problems()
            self.resolve_objects()
            self.raise_problems()
            self.check_attributes()
            self.raise_problems()
            report = self.make_tensors()
            classes = self.tensor_classes()
            self.finish_tensors(classes)
            self.fill_tables()
            self.apply_edits()
            self.raise_problems()
            self.apply_class_edits()
            self.raise_problems()
        finally:
            del self.decoder  # it holds this object: a cycle would keep every tensor until a garbage collection
            if was_enabled:
                gc.enable()
        left = find_meta_tensors(self.module)
        self.problems += [(path, "is still on the meta device: the manifest has no value for it") for path in left]
        self.raise_problems()
        return report

    def raise_problems(self) -> None:
        if self.problems:
            raise RebindError(
                f"{type(self.module).__name__} as built here does not fit the cached entry {self.manifest.fingerprint}; "
                "it was not served:",
                problems=self.problems,
            )

    # ---- is it the same module? ----------------------------------------------------------------------------------------------

    def check_tree(self) -> None:
        specs, built = self.manifest.modules, self.named
        if [path for path, _ in built] != [spec.path for spec in specs]:
            mine, theirs = {path for path, _ in built}, {spec.path for spec in specs}
            self.problems += [(path or "(root)", "is built here, but not in the entry") for path in sorted(mine - theirs)]
            self.problems += [(path or "(root)", "is in the entry, but not built here") for path in sorted(theirs - mine)]
            if not self.problems:
                self.problems.append(("(root)", "the modules come in another order than in the entry"))
            return
        first: dict[int, int] = {}
        names = {cls: type_name(cls) for cls in set(map(type, self.tree))}
        for number, ((path, module), spec) in enumerate(zip(built, specs, strict=True)):
            name = names[type(module)]
            if name != spec.cls:
                self.problems.append((path or "(root)", f"is a {name} here, a {spec.cls} in the entry"))
            same_as = first.setdefault(id(module), number)
            if (spec.same_as if spec.same_as >= 0 else number) != same_as:
                self.problems.append((path, "shares its module with another path in only one of the two"))

    def check_attributes(self) -> None:
        """What the build resolved here must be what it resolved in the producer (design D11)."""
        expected = [dict(entry) for entry in self.manifest.attribute_sets]
        decoded = [{name: self._plain(value) for name, value in entry} for entry in self.manifest.attribute_sets]
        for module, spec in zip(self.tree, self.manifest.modules, strict=True):
            if spec.attributes >= 0:
                self._check_set(spec.path, module.__dict__, decoded[spec.attributes], expected[spec.attributes])
        for number, item in enumerate(self.manifest.objects):
            if item.attributes >= 0:
                state = getattr(self.objects[len(self.tree) + number], "__dict__", {})
                self._check_set(self._object_path(number), state, decoded[item.attributes], expected[item.attributes])

    def _check_set(self, path: str, state: dict[str, Any], plain: dict[str, Any], expected: dict[str, Value]) -> None:
        for name, value in plain.items():
            mine = state.get(name, _MISSING)
            # The cheap test first; only what it cannot settle (containers, NaN, a difference) is put into tagged form.
            if mine is value or (type(mine) is type(value) and type(mine) in (str, int, bool) and mine == value):
                continue
            self._check_attribute(f"{path}.{name}" if path else name, mine, expected[name])

    def _object_path(self, number: int) -> str:
        spec = self.manifest.objects[number]
        modules = len(self.tree)
        parent = self.manifest.modules[spec.parent].path if spec.parent < modules else self._object_path(spec.parent - modules)
        key = self._plain(spec.step.key)
        step = f".{key}" if spec.step.kind in ("attribute", "slot") else f"[{key!r}]"
        return (parent + step).lstrip(".")

    @staticmethod
    def _plain(value: Value) -> Any:
        try:
            return decode(value)
        except EncodingError:
            return _MISSING

    def _check_attribute(self, path: str, mine: Any, expected: Value) -> None:
        if mine is _MISSING:
            self.problems.append((path, "is missing here"))
            return
        try:
            same = encode_attribute(mine) == expected or repr(encode_attribute(mine)) == repr(expected)
        except EncodingError:
            same = False
        if not same:
            self.problems.append((path, f"is {mine!r} here, {_show(expected)} in the entry"))

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

    def make_tensors(self) -> RebindReport:
        manifest, segments = self.manifest, self.segments
        storages: list[torch.UntypedStorage | None] = [None] * len(manifest.storages)
        dtypes = {spec.dtype: getattr(torch, spec.dtype) for spec in manifest.tensors}
        mapped = copied = 0
        for spec in manifest.storages:
            if spec.shared:
                mapped += spec.nbytes
            else:
                copied += spec.nbytes
        made = self.tensors
        counts = [0] * len(manifest.storages)
        for tensor in manifest.tensors:
            if tensor.storage >= 0:
                counts[tensor.storage] += 1
        for tensor in manifest.tensors:
            dtype = dtypes[tensor.dtype]
            number = tensor.storage
            if number < 0:
                made.append(torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=self.device))
                continue
            storage = manifest.storages[number]
            if storage.shared and counts[number] == 1 and not tensor.offset and storage.nbytes % dtype.itemsize == 0:
                # The usual case, kept short: one tensor over its whole storage.
                segment = segments[storage.segment]
                made.append(segment.view(storage.offset, storage.nbytes, dtype, tensor.shape, tensor.stride))
                continue
            memory = storages[number]
            if memory is None:
                flat = segments[storage.segment].tensor(storage.offset, storage.nbytes, torch.uint8)
                if not storage.shared:
                    flat = flat.cpu() if storage.host else flat.clone()
                memory = storages[number] = flat.untyped_storage()
            made.append(view_storage(memory, dtype, tensor.offset, tensor.shape, tensor.stride))
        return RebindReport(mapped_nbytes=mapped, copied_nbytes=copied, tensors=len(made), plain=self.plain)

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

    def finish_tensors(self, classes: dict[str, type[torch.Tensor]]) -> None:
        make = torch.Tensor._make_subclass
        tensors, keep_grad = self.tensors, self.requires_grad
        for number, spec in enumerate(self.manifest.tensors):
            tensor = tensors[number]
            if spec.flags:
                tensor = torch._neg_view(tensor) if "neg" in spec.flags else tensor
                tensor = torch.conj(tensor) if "conj" in spec.flags else tensor
            if spec.cls == "Parameter":
                tensors[number] = make(nn.Parameter, tensor, keep_grad and spec.requires_grad)
            elif spec.cls:
                tensors[number] = make(classes[spec.cls], tensor, keep_grad and spec.requires_grad)
            else:
                tensors[number] = tensor.requires_grad_() if keep_grad and spec.requires_grad else tensor

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

    def fill_tables(self) -> None:
        # Attributes of a tensor come from the first place that it is in; few tensors have any.
        pending = {index for index, tensor in enumerate(self.manifest.tensors) if tensor.attributes or tensor.inherited}
        for module, spec in zip(self.tree, self.manifest.modules, strict=True):
            if spec.same_as >= 0:
                continue
            state = module.__dict__
            self.fill_table(state["_parameters"], spec.parameters, pending)
            buffers, transient = state["_buffers"], state["_non_persistent_buffers_set"]
            if spec.buffers or buffers or transient:
                self.fill_table(buffers, [(name, index) for name, index, _ in spec.buffers], pending)
                transient.clear()
                transient.update(name for name, _, persistent in spec.buffers if not persistent)
            state["training"] = spec.training
        for index in sorted(pending):
            self.set_tensor_attributes(index, None)

    def fill_table(
        self, table: dict[str, torch.Tensor | None], entries: Sequence[tuple[str, int | None]], pending: set[int]
    ) -> None:
        if pending:
            for name, index in entries:
                if index in pending:
                    pending.remove(index)
                    self.set_tensor_attributes(index, table.get(name))
        if list(table) != [name for name, _ in entries]:
            table.clear()
        tensors = self.tensors
        for name, index in entries:
            table[name] = None if index is None else tensors[index]

    def set_tensor_attributes(self, index: int, built: torch.Tensor | None) -> None:
        spec: TensorSpec = self.manifest.tensors[index]
        state = self.tensors[index].__dict__
        for name in spec.inherited:
            if built is None or name not in built.__dict__:
                self.problems.append((f"tensor {index}.{name}", "the build makes no tensor to take this attribute over from"))
            else:
                state[name] = built.__dict__[name]
        for name, value in spec.attributes:
            state[name] = self.decoder.value(value)

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
        key = decode(edit.step.key)
        if edit.value is None:
            remove(target, edit.step.kind, key)
        else:
            assign(target, edit.step.kind, key, self.decoder.value(edit.value))

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


def _torch_constant(name: str, kinds: Any) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kinds):
        raise EncodingError(f"torch.{name} does not exist in this version", path="$")
    return found


def _show(value: Value) -> str:
    try:
        return repr(decode(value, leaf=lambda node: node))
    except EncodingError:
        return repr(value)
