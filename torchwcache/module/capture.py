"""Capture: the difference between a module as built on meta and the same module as loaded, all of it or an error.

The two object graphs are walked in pairs. Tensors go into tables; every other difference becomes an edit that replaces a leaf
*inside* the containers that the build makes, so that what two modules share stays shared; what can be neither is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.encoding import Value, to_bytes
from torchwcache.errors import CaptureError, EncodingError
from torchwcache.manifest import MANIFEST_VERSION, ClassEdit, Edit, Manifest, ModuleSpec, ObjectSpec, StorageSpec, TensorSpec
from torchwcache.module.addresses import find_addresses
from torchwcache.module.attributes import attribute_names, encode_attribute
from torchwcache.module.classes import ClassSnapshot
from torchwcache.module.graph import type_name
from torchwcache.module.pairing import Pairing
from torchwcache.module.storages import StorageGroup, dtype_name, group_storages, tensor_extent
from torchwcache.module.tensors import TensorTable, class_name_of

__all__ = ["Captured", "Construction", "Placement", "capture"]

Construction: TypeAlias = Literal["meta", "parameters-meta"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one storage lies: segment number and offset in bytes."""

    segment: int
    offset: int


@dataclass(slots=True)
class Captured:
    """A captured module state whose bytes are still where the load put them.

    Attributes:
        module: The loaded module.
        tensors: Every distinct tensor object of it.
        storages: The memory they view, in the order in which it is to be packed.
        shared: For each storage, whether all clients map it.
    """

    module: nn.Module
    tensors: list[torch.Tensor]
    storages: list[StorageGroup]
    shared: list[bool]
    specs: tuple[TensorSpec, ...]
    modules: tuple[ModuleSpec, ...]
    attribute_sets: tuple[tuple[tuple[str, Value], ...], ...]
    objects: tuple[ObjectSpec, ...]
    edits: tuple[Edit, ...]
    class_edits: tuple[ClassEdit, ...]
    construction: Construction

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(group.nbytes for group in self.storages)

    def manifest(
        self, placements: Sequence[Placement], segments: Sequence[int], *, fingerprint: str, device_id: str, memory: str
    ) -> Manifest:
        """The manifest, once every storage has its place."""
        return Manifest(
            version=MANIFEST_VERSION,
            fingerprint=fingerprint,
            device=device_id,
            memory=memory,
            construction=self.construction,
            segments=tuple(segments),
            storages=tuple(
                StorageSpec(place.segment, place.offset, group.nbytes, shared)
                for place, group, shared in zip(placements, self.storages, self.shared, strict=True)
            ),
            tensors=self.specs,
            modules=self.modules,
            attribute_sets=self.attribute_sets,
            objects=self.objects,
            edits=self.edits,
            class_edits=self.class_edits,
        )


def capture(
    module: nn.Module,
    built: nn.Module,
    *,
    device: torch.device,
    rules: CaptureRules | None = None,
    construction: Construction = "meta",
    classes: ClassSnapshot | None = None,
) -> Captured:
    """Describe everything in which ``module``, as loaded, differs from ``built``, the same module built on meta.

    Args:
        module: The finished module. It is not changed.
        built: A module that the same build made on the meta device in this process; what every client will start from.
        device: Where the tensors must live.
        rules: What may be ignored, and which tensors are constant.
        construction: How ``built`` was made; clients do it the same way.
        classes: The class attributes of the tree as they were before the load.

    Raises:
        CaptureError: Something cannot be carried; lists every path and why.
    """
    rules = rules or CaptureRules()
    pairing = Pairing(module, built, TensorTable(device), rules)
    pairing.run()
    table = pairing.table
    problems = [*pairing.problems, *table.problems]
    groups: list[StorageGroup] = []
    shared: list[bool] = []
    specs: tuple[TensorSpec, ...] = ()
    if not table.problems:  # a tensor that cannot be carried may not even have a shape to look at
        groups = group_storages(table.tensors)
        for group in groups:
            is_shared, against = table.decide_sharing(group.members, rules.constants)
            shared.append(is_shared)
            problems += against
        specs, misaligned = _tensor_specs(pairing, groups)
        problems += misaligned
        problems += find_addresses(groups, table, pairing.integers)
    class_edits: list[ClassEdit] = []
    if classes is not None:
        class_edits, against = classes.changes()
        problems += against
    if problems:
        raise CaptureError(
            f"{type(module).__name__} holds state that cannot be carried to another process; nothing was published. Declare "
            "attributes that may differ with ModelConfig(ignore={path: reason}):",
            problems=sorted(set(problems)),
        )
    modules, attribute_sets = _module_specs(pairing, built)
    return Captured(
        module=module,
        tensors=table.tensors,
        storages=groups,
        shared=shared,
        specs=specs,
        modules=modules,
        attribute_sets=attribute_sets,
        objects=tuple(pairing.object_specs),
        edits=tuple(pairing.edits),
        class_edits=tuple(class_edits),
        construction=construction,
    )


def _tensor_specs(pairing: Pairing, groups: list[StorageGroup]) -> tuple[tuple[TensorSpec, ...], list[tuple[str, str]]]:
    table = pairing.table
    storage_of: dict[int, int] = {member: number for number, group in enumerate(groups) for member in group.members}
    specs, problems = [], []
    for index, tensor in enumerate(table.tensors):
        number = storage_of.get(index, -1)
        offset = 0
        if number >= 0:
            distance = tensor_extent(tensor)[0] - groups[number].start
            if distance % tensor.element_size():
                problems.append(
                    (table.paths[index][0], "it overlaps another tensor's memory at an address its dtype cannot start at")
                )
            offset = distance // tensor.element_size()
        attributes, inherited = pairing.tensor_attributes[index]
        flags: list[Literal["conj", "neg"]] = []
        if tensor.is_conj():
            flags.append("conj")
        if tensor.is_neg():
            flags.append("neg")
        specs.append(
            TensorSpec(
                storage=number,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                offset=offset,
                cls=class_name_of(tensor),
                requires_grad=tensor.requires_grad,
                flags=tuple(flags),
                attributes=attributes,
                inherited=inherited,
            )
        )
    return tuple(specs), problems


def _module_specs(pairing: Pairing, built: nn.Module) -> tuple[tuple[ModuleSpec, ...], tuple[tuple[tuple[str, Value], ...], ...]]:
    table = pairing.table
    sets: dict[bytes, int] = {}
    values: list[tuple[tuple[str, Value], ...]] = []
    specs: list[ModuleSpec] = []
    first: dict[int, int] = {}
    for number, (path, module) in enumerate(pairing.tree):
        same_as = first.setdefault(id(module), number)
        persistent = module._non_persistent_buffers_set
        attributes = -1
        if same_as == number:
            found = _resolved_attributes(pairing, number, path)
            key = b"".join(name.encode() + b"\0" + to_bytes(value) for name, value in found)
            attributes = sets.setdefault(key, len(values))
            if attributes == len(values):
                values.append(found)
        specs.append(
            ModuleSpec(
                path=path,
                cls=type_name(type(module)),
                same_as=-1 if same_as == number else same_as,
                training=module.training,
                parameters=tuple((name, None if p is None else table.index(p)) for name, p in module._parameters.items()),
                buffers=tuple(
                    (name, None if b is None else table.index(b), name not in persistent) for name, b in module._buffers.items()
                ),
                attributes=attributes,
            )
        )
    return tuple(specs), tuple(values)


def _resolved_attributes(pairing: Pairing, number: int, path: str) -> tuple[tuple[str, Value], ...]:
    """Plain attributes as the build resolved them: a client whose build resolves them otherwise must not serve (D11)."""
    built = pairing.built_tree[number]
    found: list[tuple[str, Value]] = []
    for name in attribute_names(built):
        if (number, name) in pairing.edited or pairing.ignored(f"{path}.{name}" if path else name):
            continue
        try:
            value = encode_attribute(built.__dict__[name])
        except EncodingError:
            continue  # not a plain value: compared by pairing here, by the object table in the client
        if value is not None:
            found.append((name, value))
    return tuple(found)
