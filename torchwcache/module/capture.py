"""Capture: the difference between a module as built on meta and the same module as loaded, all of it or an error.

The two object graphs are walked in pairs. Tensors go into tables; every other difference becomes an edit that replaces a leaf
*inside* the containers that the build makes, so that what two modules share stays shared; what can be neither is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import torch
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.encoding import to_bytes
from torchwcache.errors import CaptureError, EncodingError
from torchwcache.manifest import (
    MANIFEST_VERSION,
    Attributes,
    ClassEdit,
    Edit,
    Manifest,
    Modules,
    ModuleSpec,
    ObjectSpec,
    StorageSpec,
    TensorKind,
    Tensors,
    TensorSpec,
    pack_modules,
    pack_storages,
    pack_tensors,
)
from torchwcache.module.addresses import find_addresses
from torchwcache.module.classes import ClassSnapshot
from torchwcache.module.graph import type_name
from torchwcache.module.pairing import Pairing
from torchwcache.module.storages import StorageGroup, dtype_name, group_storages, tensor_extent
from torchwcache.module.tensors import TensorTable, class_name_of, is_host_copy

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
        host: For each storage, whether clients copy it into host memory although the entry lies elsewhere.
    """

    module: nn.Module
    tensors: list[torch.Tensor]
    storages: list[StorageGroup]
    shared: list[bool]
    host: list[bool]
    table: Tensors
    modules: Modules
    attribute_sets: tuple[Attributes, ...]
    objects: tuple[ObjectSpec, ...]
    edits: tuple[Edit, ...]
    class_edits: tuple[ClassEdit, ...]
    construction: Construction

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(group.nbytes for group in self.storages)

    def manifest(
        self,
        placements: Sequence[Placement],
        segments: Sequence[int],
        *,
        fingerprint: str,
        device_id: str,
        memory: str,
        addresses: Sequence[int] = (),
    ) -> Manifest:
        """The manifest, once every storage has its place."""
        return Manifest(
            version=MANIFEST_VERSION,
            fingerprint=fingerprint,
            device=device_id,
            memory=memory,
            construction=self.construction,
            segments=tuple(segments),
            addresses=tuple(addresses),
            storages=pack_storages(
                [
                    StorageSpec(place.segment, place.offset, group.nbytes, shared, host)
                    for place, group, shared, host in zip(placements, self.storages, self.shared, self.host, strict=True)
                ]
            ),
            tensors=self.table,
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
    specs: list[TensorSpec] = []
    if not table.problems:  # a tensor that cannot be carried may not even have a shape to look at
        groups = group_storages(table.tensors)
        for group in groups:
            is_shared, against = table.decide_sharing(group.members, rules.constants)
            shared.append(is_shared)
            problems += against
        specs, misaligned = _tensor_specs(pairing, groups)
        problems += misaligned
        problems += find_addresses(groups, table, pairing.integers)
        problems += _aliased_arrays(pairing, groups)
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
    sets = _AttributeSets()
    objects = _object_specs(pairing, sets)
    return Captured(
        module=module,
        tensors=table.tensors,
        storages=groups,
        shared=shared,
        host=[is_host_copy(table.tensors[group.members[0]], device) for group in groups],
        table=pack_tensors(specs),
        modules=pack_modules(_module_specs(pairing)),
        attribute_sets=tuple(sets.values),
        objects=objects,
        edits=tuple(pairing.edits),
        class_edits=tuple(class_edits),
        construction=construction,
    )


def _tensor_specs(pairing: Pairing, groups: list[StorageGroup]) -> tuple[list[TensorSpec], list[tuple[str, str]]]:
    table = pairing.table
    storage_of: dict[int, int] = {member: number for number, group in enumerate(groups) for member in group.members}
    specs, problems = [], []
    for index, tensor in enumerate(table.tensors):
        number = storage_of.get(index, -2 if is_host_copy(tensor, table.device) else -1)
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
        kind = TensorKind(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            cls=class_name_of(tensor),
            requires_grad=tensor.requires_grad,
            flags=tuple(flags),
            attributes=attributes,
            inherited=inherited,
        )
        specs.append(TensorSpec(kind, number, offset))
    return specs, problems


def _aliased_arrays(pairing: Pairing, groups: list[StorageGroup]) -> list[tuple[str, str]]:
    return [
        (path, f"this NumPy array lies in the memory of {pairing.table.paths[group.members[0]][0]}, and would no longer do so")
        for path, start, end in pairing.arrays
        for group in groups
        if start < group.end and group.start < end
    ]


class _AttributeSets:
    """Sets of plain attributes, each kept once."""

    def __init__(self) -> None:
        self.values: list[Attributes] = []
        self._index: dict[bytes, int] = {}

    def add(self, found: Attributes) -> int:
        """Index of a set; -1 for the empty one."""
        if not found:
            return -1
        key = b"".join(name.encode() + b"\0" + to_bytes(value) for name, value in found)
        index = self._index.setdefault(key, len(self.values))
        if index == len(self.values):
            self.values.append(found)
        return index


def _module_specs(pairing: Pairing) -> list[ModuleSpec]:
    specs: list[ModuleSpec] = []
    first: dict[int, int] = {}
    for number, (path, module) in enumerate(pairing.tree):
        cls, same_as = type_name(type(module)), first.setdefault(id(module), number)
        if same_as != number:
            specs.append(ModuleSpec(path, cls, module.training, same_as))
            continue
        node = pairing.mate_of(module)
        assert node is not None
        persistent = module._non_persistent_buffers_set
        specs.append(
            ModuleSpec(
                path=path,
                cls=cls,
                training=module.training,
                parameters=tuple((name, _number(pairing, tensor)) for name, tensor in module._parameters.items()),
                buffers=tuple((name, name not in persistent, _number(pairing, tensor)) for name, tensor in module._buffers.items()),
                attributes=pairing.resolved_attributes(node),
            )
        )
    return specs


def _number(pairing: Pairing, tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None else pairing.table.index(tensor)


def _object_specs(pairing: Pairing, sets: _AttributeSets) -> tuple[ObjectSpec, ...]:
    """The objects that edits refer to, and those whose resolved attributes clients must find as they were."""
    attributes: dict[int, int] = {}
    for node in pairing.helper_nodes():
        index = sets.add(pairing.resolved_attributes(node))
        if index < 0:
            continue
        try:
            attributes[pairing.node_index(node)] = index
        except EncodingError:
            continue  # held under a key that has no name in another process
    start = len(pairing.tree)
    return tuple(
        msgspec.structs.replace(spec, attributes=attributes.get(start + i, -1)) for i, spec in enumerate(pairing.object_specs)
    )
