"""Make the tensors that a manifest describes, over segments that are mapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress, groupby

import torch
from torch import nn

from torchwcache.manifest import Manifest, TensorKind
from torchwcache.memory.base import Layout, MappedSegment
from torchwcache.module.storages import view_storage

__all__ = ["make_tensors"]


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
    tensors = manifest.tensors
    # Nothing here is to be differentiated through; not asking autograd about every step saves a tenth of the time.
    with torch._C._AutoDispatchBelowAutograd():
        unusual = _Unusual(manifest, segments, device)
        apart = unusual.numbers
        if not apart:
            made = _usual(manifest, segments, tensors.kind, tensors.storage, device)
        else:
            numbers = [number for number in range(len(tensors)) if number not in apart]
            kinds, places = [tensors.kind[number] for number in numbers], [tensors.storage[number] for number in numbers]
            found = {number: unusual.make(number) for number in apart}
            found.update(zip(numbers, _usual(manifest, segments, kinds, places, device), strict=True))
            made = [found[number] for number in range(len(tensors))]
    # As torch itself makes a parameter (``UninitializedParameter.materialize``) where nobody else has the tensor: without the
    # second tensor over the same memory that ``nn.Parameter(tensor)`` makes.
    parameter, is_parameter = nn.Parameter, [kind.cls == "Parameter" for kind in tensors.kinds]
    for tensor in compress(made, map(is_parameter.__getitem__, tensors.kind)):
        tensor.__class__ = parameter
    unfinished = {number for number, kind in enumerate(tensors.kinds) if _is_unfinished(kind, requires_grad)}
    if unfinished:
        for number, kind in enumerate(tensors.kind):
            if kind in unfinished:
                made[number] = _finished(made[number], tensors.kinds[kind], classes, requires_grad)
    return made


def _usual(
    manifest: Manifest, segments: Sequence[MappedSegment], kinds: Sequence[int], numbers: Sequence[int], device: torch.device
) -> list[torch.Tensor]:
    """Tensors that are all of one storage each: that of ``numbers``, which come segment by segment nearly always."""
    storages = manifest.storages
    layouts = [_layout(kind, device) for kind in manifest.tensors.kinds]
    where, offsets, nbytes = (
        list(map(column.__getitem__, numbers)) for column in (storages.segment, storages.offset, storages.nbytes)
    )
    made: list[torch.Tensor] = []
    for segment, run in groupby(where):
        rows = slice(len(made), len(made) + len(list(run)))
        made += segments[segment].views(offsets[rows], nbytes[rows], kinds[rows], layouts)
    return made


def _layout(kind: TensorKind, device: torch.device) -> Layout:
    dtype = getattr(torch, kind.dtype)
    return {"dtype": dtype, "device": device, "size": kind.shape, "stride": kind.stride, "storage_offset": 0}


class _Unusual:
    """Tensors that are not just all of one storage that everybody maps.

    Attributes:
        numbers: Those that have no bytes, share their storage with others, start later than it, or lie in a copy of it.
    """

    def __init__(self, manifest: Manifest, segments: Sequence[MappedSegment], device: torch.device) -> None:
        self._tensors, self._storages, self._segments, self._device = manifest.tensors, manifest.storages, segments, device
        self._private, self._host = set(self._storages.private), set(self._storages.host)
        self._owners: dict[int, torch.Tensor] = {}  # of each storage all bytes; all its tensors view their memory
        self._offsets = dict(self._tensors.offsets)
        storage = self._tensors.storage
        apart = {-1, -2, *self._private}
        if len(set(storage)) < len(storage):
            apart.update(number for number, count in Counter(storage).items() if count > 1)
        self.numbers = set(self._offsets)
        if not apart.isdisjoint(storage):
            self.numbers.update([number for number, where in enumerate(storage) if where in apart])

    def make(self, number: int) -> torch.Tensor:
        """One of them, as a plain tensor."""
        kind, where = self._tensors.kinds[self._tensors.kind[number]], self._tensors.storage[number]
        dtype: torch.dtype = getattr(torch, kind.dtype)
        if where < 0:
            device = self._device if where == -1 else "cpu"
            return torch.empty_strided(kind.shape, kind.stride, dtype=dtype, device=device)
        owner = self._owners.get(where)
        if owner is None:
            owner = self._owners[where] = self._whole(where)
        return view_storage(owner.untyped_storage(), dtype, self._offsets.get(number, 0), kind.shape, kind.stride)

    def _whole(self, number: int) -> torch.Tensor:
        """All bytes of a storage: the published ones, or a copy of this process's own."""
        storages = self._storages
        segment = self._segments[storages.segment[number]]
        flat = segment.tensor(storages.offset[number], storages.nbytes[number], torch.uint8)
        if number not in self._private:
            return flat
        return flat.cpu() if number in self._host else flat.clone()


def _is_unfinished(kind: TensorKind, requires_grad: bool) -> bool:
    return bool(kind.flags) or kind.cls not in ("", "Parameter") or (requires_grad and kind.requires_grad)


def _finished(
    tensor: torch.Tensor, kind: TensorKind, classes: Mapping[str, type[torch.Tensor]], requires_grad: bool
) -> torch.Tensor:
    """A tensor with conjugation or negation pending, of a class of its own, or one to compute gradients for."""
    tensor = torch._neg_view(tensor) if "neg" in kind.flags else tensor
    tensor = torch.conj(tensor) if "conj" in kind.flags else tensor
    requires_grad = requires_grad and kind.requires_grad
    if kind.cls and (kind.flags or kind.cls != "Parameter"):
        return torch.Tensor._make_subclass(classes.get(kind.cls, nn.Parameter), tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor
