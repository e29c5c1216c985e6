"""Make the tensors that a manifest describes, over segments that are mapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import nn

from torchwcache.manifest import Manifest, TensorKind
from torchwcache.memory.base import Layout, MappedSegment
from torchwcache.module.storages import view_storage

__all__ = ["TensorMaker"]

_BATCH = 200
"""So many tensors are made in one step, which costs about as much as five of them."""


class TensorMaker:
    """Makes the tensors of a manifest in its order, as far as they are needed.

    A tensor that takes the place of another one is best made just before. Then it gets memory that an earlier one has left, and is
    in the core's cache. A hundred thousand made in advance need fresh memory, and the kernel takes long to give it.

    Args:
        manifest: Validated against the segments.
        segments: The mapped segments, in the manifest's order.
        device: Where tensors without bytes are made.
        classes: The tensor classes that the manifest names, but for ``torch.Tensor`` and ``torch.nn.Parameter``.
        requires_grad: Give tensors the ``requires_grad`` that they had when they were published; without it none requires grad.
    """

    def __init__(
        self,
        manifest: Manifest,
        segments: Sequence[MappedSegment],
        *,
        device: torch.device,
        classes: Mapping[str, type[torch.Tensor]],
        requires_grad: bool,
    ) -> None:
        self._storages, self._tensors, self._segments = manifest.storages, manifest.tensors, segments
        self._classes, self._requires_grad = classes, requires_grad
        kinds = self._tensors.kinds
        self._layouts = [_layout(kind, device) for kind in kinds]
        self._is_parameter = [kind.cls == "Parameter" for kind in kinds]
        self._unfinished = {number for number, kind in enumerate(kinds) if _is_unfinished(kind, requires_grad)}
        with torch._C._AutoDispatchBelowAutograd():
            self._unusual = _Unusual(manifest, segments, device)
        self._made: list[torch.Tensor] = []

    def __getitem__(self, number: int) -> torch.Tensor:
        """One of them.

        Raises:
            IndexError: There is no such tensor.
        """
        if not 0 <= number < len(self._tensors):
            raise IndexError(f"no tensor {number}")
        if number >= len(self._made):
            self._make(number + 1)
        return self._made[number]

    def column(self, numbers: Sequence[int]) -> list[torch.Tensor | None]:
        """Some of them, and ``None`` for -1."""
        self._make(max(numbers, default=-1) + 1)
        made = self._made
        if -1 in numbers:
            return [made[number] if number >= 0 else None for number in numbers]
        return list(map(made.__getitem__, numbers))

    def _make(self, count: int) -> None:
        """See to it that there are the first ``count``."""
        # Nothing here is to be differentiated through; not asking autograd about every step saves a tenth of the time.
        with torch._C._AutoDispatchBelowAutograd():
            while len(self._made) < count:
                self._made += self._step(len(self._made))

    def _step(self, start: int) -> list[torch.Tensor]:
        rows = slice(start, start + _BATCH)
        kinds, places = (column.view[rows].tolist() for column in (self._tensors.kind, self._tensors.storage))
        numbers, apart = range(start, start + len(kinds)), self._unusual.numbers
        if apart.isdisjoint(numbers):
            made = self._views(kinds, places)
        else:
            usual = [number not in apart for number in numbers]
            views = iter(self._views(list(compress(kinds, usual)), list(compress(places, usual))))
            made = [self._unusual.make(number) if number in apart else next(views) for number in numbers]
        # As torch itself makes a parameter (``UninitializedParameter.materialize``) where nobody else has the tensor: without the
        # second tensor over the same memory that ``nn.Parameter(tensor)`` makes.
        parameter = nn.Parameter
        for tensor in compress(made, map(self._is_parameter.__getitem__, kinds)):
            tensor.__class__ = parameter
        if not self._unfinished.isdisjoint(kinds):
            made = [
                self._finished(tensor, kind) if kind in self._unfinished else tensor
                for tensor, kind in zip(made, kinds, strict=True)
            ]
        return made

    def _views(self, kinds: Sequence[int], numbers: Sequence[int]) -> list[torch.Tensor]:
        """Tensors that are all of one storage each: that of ``numbers``."""
        storages = self._storages
        where, offsets, nbytes = (
            list(map(column.view.__getitem__, numbers)) for column in (storages.segment, storages.offset, storages.nbytes)
        )
        segments = set(where)
        if len(segments) == 1:
            return self._segments[where[0]].views(offsets, nbytes, kinds, self._layouts)
        found = {}
        for segment in segments:
            mine = [number == segment for number in where]
            rows = [list(compress(column, mine)) for column in (offsets, nbytes, kinds)]
            found[segment] = iter(self._segments[segment].views(rows[0], rows[1], rows[2], self._layouts))
        return [next(found[segment]) for segment in where]

    def _finished(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """A tensor with conjugation or negation pending, of a class of its own, or one to compute gradients for."""
        kind = self._tensors.kinds[number]
        tensor = torch._neg_view(tensor) if "neg" in kind.flags else tensor
        tensor = torch.conj(tensor) if "conj" in kind.flags else tensor
        requires_grad = self._requires_grad and kind.requires_grad
        if kind.cls and (kind.flags or kind.cls != "Parameter"):
            return torch.Tensor._make_subclass(self._classes.get(kind.cls, nn.Parameter), tensor, requires_grad)
        return tensor.requires_grad_() if requires_grad else tensor


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
        # Of each storage all bytes; all its tensors view their memory. What is copied is copied now: memory may run out.
        self._owners: dict[int, torch.Tensor] = {number: self._whole(number) for number in self._storages.private}
        self._offsets = dict(self._tensors.offsets)
        storage = self._tensors.storage
        # Nearly always each storage has one tensor, which is seen in a fraction of the time that a set takes.
        seen = bytearray(len(self._storages) + 2)  # the numbers -1 and -2 stand for no storage, and are the last two here
        for part in storage.parts():
            for number in part:
                seen[number] = 1
        apart = {-1, -2, *self._private}
        if seen.count(1) < len(storage):
            apart.update(number for number, count in Counter(storage).items() if count > 1)
        self.numbers = set(self._offsets)
        if any(map(seen.__getitem__, apart)):
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
