"""Make the tensors that a manifest describes, over segments that are mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from torchwcache.manifest import Manifest, StorageSpec, TensorSpec
from torchwcache.memory.base import MappedSegment
from torchwcache.module.storages import view_storage

__all__ = ["make_tensors"]


class _DTypes(dict[str, tuple[torch.dtype, int]]):
    """Dtypes and the bytes of an element, by name."""

    def __missing__(self, name: str) -> tuple[torch.dtype, int]:
        dtype: torch.dtype = getattr(torch, name)
        found = self[name] = (dtype, dtype.itemsize)
        return found


def make_tensors(
    manifest: Manifest,
    segments: Sequence[MappedSegment],
    *,
    device: torch.device,
    classes: Mapping[str, type[torch.Tensor]],
    requires_grad: bool,
) -> list[torch.Tensor]:
    """Every tensor of a manifest, in its order.

    Args:
        manifest: Validated against the segments.
        segments: The mapped segments, in the manifest's order.
        device: Where tensors without bytes are made.
        classes: The tensor classes that the manifest names, but for ``torch.Tensor`` and ``torch.nn.Parameter``.
        requires_grad: Give tensors the ``requires_grad`` that they had when they were published; without it none requires grad.
    """
    storages = manifest.storages
    owners: list[torch.Tensor | None] = [None] * len(storages)  # of each storage the first tensor; later ones view its memory
    views = [segment.view for segment in segments]
    dtypes, parameter = _DTypes(), nn.Parameter
    made: list[torch.Tensor] = []
    special: list[int] = []
    # Nothing here is to be differentiated through; not asking autograd about every step saves a tenth of the time.
    with torch._C._AutoDispatchBelowAutograd():
        for spec in manifest.tensors:
            dtype, itemsize = dtypes[spec.dtype]
            number = spec.storage
            if number >= 0:
                storage, owner = storages[number], owners[number]
                if owner is None and storage.shared and not spec.offset and not storage.nbytes % itemsize:
                    tensor = views[storage.segment](storage.offset, storage.nbytes, dtype, spec.shape, spec.stride)
                    owners[number] = tensor
                else:
                    if owner is None:
                        owner = owners[number] = _whole(storage, segments)
                    tensor = view_storage(owner.untyped_storage(), dtype, spec.offset, spec.shape, spec.stride)
            else:
                where = device if number == -1 else "cpu"
                tensor = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=where)
            cls = spec.cls
            if cls == "Parameter":
                # As torch itself makes one (``UninitializedParameter.materialize``) where nobody else has the tensor: without the
                # second tensor over the same memory that ``nn.Parameter(tensor)`` makes.
                tensor.__class__ = parameter
            elif cls:
                special.append(len(made))
            if spec.flags or (requires_grad and spec.requires_grad):
                special.append(len(made))
            made.append(tensor)
    for number in dict.fromkeys(special):
        made[number] = _finished(made[number], manifest.tensors[number], classes, requires_grad)
    return made


def _whole(storage: StorageSpec, segments: Sequence[MappedSegment]) -> torch.Tensor:
    """All bytes of a storage: the published ones, or a copy of this process's own."""
    flat = segments[storage.segment].tensor(storage.offset, storage.nbytes, torch.uint8)
    if storage.shared:
        return flat
    return flat.cpu() if storage.host else flat.clone()


def _finished(
    tensor: torch.Tensor, spec: TensorSpec, classes: Mapping[str, type[torch.Tensor]], requires_grad: bool
) -> torch.Tensor:
    """A tensor with conjugation or negation pending, of a class of its own, or one to compute gradients for."""
    tensor = torch._neg_view(tensor) if "neg" in spec.flags else tensor
    tensor = torch.conj(tensor) if "conj" in spec.flags else tensor
    requires_grad = requires_grad and spec.requires_grad
    if spec.cls and (spec.flags or spec.cls != "Parameter"):
        return torch.Tensor._make_subclass(classes.get(spec.cls, nn.Parameter), tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor
