"""Describe a module: everything that a comparison with another process needs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.module.graph import type_name
from torchwcache.module.storages import dtype_name, group_storages, tensor_extent
from torchwcache.module.tensors import class_name_of
from torchwcache.verification.description import ModuleDescription, ModuleFacts, StorageFacts, TensorFacts
from torchwcache.verification.digests import digest_of_memory, digest_of_tensor
from torchwcache.verification.state import StateWalk, class_facts

__all__ = ["describe_module"]


def describe_module(module: nn.Module, *, rules: CaptureRules | None = None) -> ModuleDescription:
    """Describe a module's whole state.

    Args:
        module: As loaded, or as attached. It is not changed.
        rules: Attributes to leave out (``ignore``).
    """
    ignored = dict((rules or CaptureRules()).ignore)
    places = _Places()
    walk = StateWalk(ignored, places.plain)
    tree = list(module.named_modules(remove_duplicate=False))
    firsts: dict[int, str] = {}
    for path, item in tree:
        firsts.setdefault(id(item), path)
        walk.know(item, path)
    for path, item in tree:
        places.tables(item, path)
    for path, item in tree:
        if firsts[id(item)] == path:
            walk.module(item, path)
    for path, tensor in list(places.first_of.values()):
        if path in places.table_paths:
            walk.tensor(tensor, path)
    return ModuleDescription(
        modules={path: _module_facts(item, firsts[id(item)]) for path, item in tree},
        tensors=places.facts(),
        storages=places.storages,
        state=walk.facts,
        classes=class_facts(module),
        ignored=ignored,
    )


def _module_facts(module: nn.Module, first: str) -> ModuleFacts:
    return ModuleFacts(
        cls=type_name(type(module)),
        training=module.training,
        parameters=tuple(module._parameters),
        buffers=tuple(module._buffers),
        modules=tuple(module._modules),
        transient=tuple(sorted(module._non_persistent_buffers_set)),
        same_as=first or "(root)",
    )


class _Places:
    """Every place that holds a tensor, in the order of the walk."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, torch.Tensor]] = {}
        self.first_of: dict[int, tuple[str, torch.Tensor]] = {}
        self.table_paths: set[str] = set()
        self.storages: dict[str, StorageFacts] = {}

    def tables(self, module: nn.Module, path: str) -> None:
        """Note what is registered."""
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor):
                    place = f"{path}.{name}" if path else name
                    self._note(kind, tensor, place)
                    self.table_paths.add(place)

    def plain(self, tensor: torch.Tensor, path: str) -> bool:
        """Note any other place; says whether the tensor is new."""
        return self._note("plain", tensor, path)

    def _note(self, kind: str, tensor: torch.Tensor, path: str) -> bool:
        self.found.setdefault(path, (kind, tensor))
        return self.first_of.setdefault(id(tensor), (path, tensor))[0] == path

    def facts(self) -> dict[str, TensorFacts]:
        """Describe all that was noted, and fill :attr:`storages`."""
        distinct = list(self.first_of.values())
        digests: dict[tuple[object, ...], str] = {}
        memory = self._memory([(path, tensor) for path, tensor in distinct if not tensor.is_meta], digests)
        found: dict[str, TensorFacts] = {}
        for path, (kind, tensor) in self.found.items():
            storage, start = memory.get(id(tensor), ("", 0))
            found[path] = TensorFacts(
                kind=kind,  # type: ignore[arg-type]
                cls=class_name_of(tensor),
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()) if tensor.layout is torch.strided else (),
                device=str(tensor.device),
                requires_grad=tensor.requires_grad,
                same_as=self.first_of[id(tensor)][0],
                storage=storage,
                offset=tensor_extent(tensor)[0] - start if storage else 0,
                digest=_digest(tensor, digests) if storage else "",
            )
        return found

    def _memory(
        self, distinct: list[tuple[str, torch.Tensor]], digests: dict[tuple[object, ...], str]
    ) -> Mapping[int, tuple[str, int]]:
        """For each tensor the name of its memory, and where that starts; notes the digests of tensors that are all of it."""
        tensors = [tensor for _, tensor in distinct]
        found: dict[int, tuple[str, int]] = {}
        for group in group_storages(tensors):
            members = [tensors[i] for i in group.members]
            start = min(tensor_extent(tensor)[0] for tensor in members)
            nbytes = max(tensor_extent(tensor)[1] for tensor in members) - start
            name = distinct[min(group.members)][0]
            digest = digest_of_memory(start, nbytes, members)
            self.storages[name] = StorageFacts(nbytes=nbytes, digest=digest, members=len(members))
            for tensor in members:
                found[id(tensor)] = (name, start)
                if tensor.is_contiguous() and tensor_extent(tensor) == (start, start + nbytes) and not _is_lazily_changed(tensor):
                    digests[_region(tensor)] = digest  # the usual case; most bytes are hashed once
        return found


def _is_lazily_changed(tensor: torch.Tensor) -> bool:
    """Whether its elements are not what is in memory."""
    return tensor.is_conj() or tensor.is_neg()


def _region(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.is_conj(), tensor.is_neg()


def _digest(tensor: torch.Tensor, known: dict[tuple[object, ...], str]) -> str:
    """Tied and repeated views are hashed once."""
    key = _region(tensor)
    if key not in known:
        known[key] = digest_of_tensor(tensor)
    return known[key]
