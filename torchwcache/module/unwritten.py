"""Which weights an engine's load never wrote: what the checkpoint lacks may stay as the model's constructor left it.

That is memory with whatever was in it, or random values, and would be published as if they were weights. So while the model is
built, uninitialized memory is filled with a pattern, and random parameters are replaced by it; what still has the pattern between
the load and the processing after it was not written, down to one expert's shard. Names are not guessed, and what writes (a weight
loader, a thread, a copy) does not matter. A value that the constructor itself gave (ones of a norm, a scale's default) stays, and
counts as written: it is the same in every process.

Afterwards no weight has the pattern. Where it was there are zeros, or the random values that the constructor drew: what an engine
without us could have found there. What a model derives from its weights while it loads them is left as it came out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["UNSEEN", "Parts", "Watch", "watched"]

logger = logging.getLogger(__name__)

Parts = Callable[[nn.Module], Mapping[str, Sequence[torch.Tensor]]]
"""Gives, for the weights of a model that an engine pads, the parts of them that a checkpoint fills, as views."""

UNSEEN = "all of them, for all that is known: the load did not go where it was watched"
"""What is reported instead of names when a load was not seen."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PATTERNS = {1: 0x7F, 2: 0x7FEA, 4: 0x7FEA5EED, 8: 0x7FFA5EED5EED5EED}
"""By size of an element: quiet NaNs in every floating dtype of that size, with a payload that no computation makes."""

_ROW = 16
"""How many elements of the pattern next to each other say something in a dtype that has it among its usual values."""

_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
_CHUNK = 1 << 26


class Watch:
    """What is found out about one load."""

    def __init__(self, unset: Mapping[str, float], parts: Parts) -> None:
        self._unset, self._parts = dict(unset), parts
        self._found: dict[str, None] = {}
        self._drawn: dict[str, torch.Tensor] = {}
        self._seen = self._failed = False

    @property
    def names(self) -> tuple[str, ...]:
        """Weights that were not written, or not all of their parts; each by its name in the module."""
        return tuple(self._found) if self._seen and not self._failed else (UNSEEN,)

    def _try(self, look: Callable[[], None]) -> bool:
        """A failure of the watch is none of the load's: the engine goes on, and what was not watched is not published."""
        try:
            with torch.no_grad():
                look()
        except Exception:
            logger.warning("what this load does not write cannot be found out; the model will not be published", exc_info=True)
            self._failed = True
            return False
        return True

    def _built(self, model: Any, building: _Building) -> None:
        """Leave the pattern in weights only, and put it where they are random."""
        if building.failure is not None:
            raise building.failure
        weights = _weights(model)
        owned = {tensor.untyped_storage()._cdata for tensor in weights.values()}
        for storage, dtype in building.empty():
            if storage._cdata not in owned:
                # Scratch memory of the engine's, or what a computation works on: zeros are as good as what was there.
                _replace(torch.empty(0, dtype=dtype, device=storage.device).set_(storage), None)
        for name, tensor in weights.items():
            if tensor.is_floating_point() and building.is_random(tensor):
                self._drawn[name] = tensor.detach().to("cpu", copy=True)
                _bits(tensor).fill_(_PATTERNS[tensor.element_size()])

    def _loaded(self, model: Any) -> None:
        self._seen = True
        padded = self._parts(model)
        for name, tensor in _weights(model).items():
            if _is_unwritten(tensor):
                if any(map(_is_unwritten, padded.get(name, (tensor,)))):
                    self._found[name] = None
                _replace(tensor, self._drawn.get(name))
            elif any(name.endswith(end) and _holds(tensor, value) for end, value in self._unset.items()):
                self._found[name] = None
        self._drawn.clear()


@contextmanager
def watched(
    namespace: Any,
    build: str,
    *,
    load: str = "load_weights",
    unset: Mapping[str, float] | None = None,
    parts: Parts = lambda model: {},
) -> Iterator[Watch]:
    """Watch the one load that is done inside, in this thread.

    Args:
        namespace: The module in whose name the engine calls what builds the model.
        build: That name.
        load: The method of the model that writes its weights; what is done with them begins when it is over.
        unset: The end of a parameter's name to a value that the engine puts there before it loads, and no checkpoint holds.
        parts: What of a padded weight a checkpoint fills. The rest may stay unwritten.
    """
    watch = Watch(unset or {}, parts)
    models: list[Any] = []
    original: Callable[..., Any] = getattr(namespace, build)

    def build_and_fill(*args: Any, **kwargs: Any) -> Any:
        with _Building() as building:
            model = original(*args, **kwargs)
        watch._try(lambda: watch._built(model, building))
        write = getattr(model, load)

        def load_and_look(*args: Any, **kwargs: Any) -> Any:
            result = write(*args, **kwargs)
            watch._try(lambda: watch._loaded(model))
            return result

        setattr(model, load, load_and_look)
        models.append(model)
        return model

    setattr(namespace, build, build_and_fill)
    try:
        yield watch
    finally:
        setattr(namespace, build, original)
        for model in models:
            model.__dict__.pop(load, None)  # the class's own is left


class _Building(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills what is made without values, and remembers what is random."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._empty: list[tuple[StorageWeakRef, torch.dtype]] = []
        self._random: dict[int, StorageWeakRef] = {}
        self.failure: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            self._note(func, args, kwargs, result)
        except Exception as error:  # of tensors without a storage, say: see ``Watch._try``
            self.failure = error
        return result

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any] | None, result: Any) -> None:
        name = func.overloadpacket.__name__
        if name in _EMPTY:
            self._fill(result)
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self._taint(result)
        elif self._random:
            if name in ("zero_", "fill_") and result.nbytes == result.untyped_storage().nbytes():
                self._random.pop(result.untyped_storage()._cdata, None)
            elif any(self.is_random(tensor) for tensor in _tensors((args, kwargs))):
                self._taint(result)

    def _fill(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided or tensor.dtype is torch.bool:
            return
        if tensor.element_size() in _BITS:
            bits = torch.empty(0, dtype=_BITS[tensor.element_size()], device=tensor.device)
            bits.set_(tensor.untyped_storage()).fill_(_PATTERNS[tensor.element_size()])
            self._empty.append((_reference(tensor), tensor.dtype))

    def _taint(self, result: Any) -> None:
        for tensor in _tensors(result):
            if not tensor.is_meta and tensor.layout is torch.strided:
                reference = _reference(tensor)
                self._random[reference.cdata] = reference

    def is_random(self, tensor: torch.Tensor) -> bool:
        """Whether random values went into what a tensor views."""
        if tensor.is_meta or tensor.layout is not torch.strided:
            return False
        reference = self._random.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()  # type: ignore[no-untyped-call]

    def empty(self) -> Iterator[tuple[Any, torch.dtype]]:
        """Storages that were made without values and are still there, each with the dtype that it was made for."""
        for reference, dtype in self._empty:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                yield storage, dtype


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    """Does not keep the memory; a storage that is made later has another one."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint may hold: parameters, and buffers that are part of a state dict; tied ones once."""
    left_out = {
        f"{path}.{name}" if path else name for path, module in model.named_modules() for name in module._non_persistent_buffers_set
    }
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    found |= {name: buffer for name, buffer in model.named_buffers() if name not in left_out}
    return {
        name: tensor
        for name, tensor in found.items()
        if not tensor.is_meta and tensor.layout is torch.strided and not tensor.is_complex() and tensor.dtype is not torch.bool
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_BITS[tensor.element_size()])


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of a tensor's bits of bounded size, so that a mask over them is small next to the weights."""
    bits = _bits(tensor)
    if not bits.is_contiguous():
        yield bits
    elif _is_narrow(tensor) and bits.dim() > 1 and bits.shape[-1] >= _ROW:
        rows = bits.view(-1, bits.shape[-1])
        yield from torch.tensor_split(rows, 1 + bits.numel() // _CHUNK)  # of about the same size: none has a few rows only
    elif _is_narrow(tensor):
        yield bits.view(-1)
    else:
        yield from torch.split(bits.view(-1), _CHUNK)


def _is_narrow(tensor: torch.Tensor) -> bool:
    """Whether the pattern is among the usual values of a tensor's dtype."""
    return tensor.element_size() == 1 or tensor.dtype in (torch.int16, torch.uint16)


def _mask(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Where a part was not written; in narrow dtypes whole rows and columns only, and short tensors as a whole."""
    equal = part == _PATTERNS[tensor.element_size()]
    if not _is_narrow(tensor):
        return equal
    if part.dim() > 1 and part.shape[-1] >= _ROW:
        rows = equal.all(-1, keepdim=True)
        # A weight that is wider than what is loaded into it: in a narrow float its rest would be NaN.
        return rows | equal.all(-2, keepdim=True) if part.shape[-2] >= _ROW else rows
    return equal.all() if part.numel() >= _ROW else torch.zeros((), dtype=torch.bool, device=part.device)


def _holds(tensor: torch.Tensor, value: float) -> bool:
    return tensor.dtype is torch.float32 and bool((tensor == value).any())


def _is_unwritten(tensor: torch.Tensor) -> bool:
    # Of all that is not a NaN, nothing is larger than the pattern, taken as integers: what is fine is known without a mask, whose
    # memory the engine would see in what the load took of the device.
    if tensor.numel() == 0 or int(_bits(tensor).max()) < _PATTERNS[tensor.element_size()]:
        return False
    return any(bool(_mask(tensor, part).any()) for part in _parts(tensor))


def _replace(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
    """Put values in the place of the pattern; zeros where there are none."""
    if tensor.numel() == 0:
        return
    if values is not None and values.shape == tensor.shape and values.dtype == tensor.dtype:
        bits = _bits(tensor)
        bits.copy_(torch.where(_mask(tensor, bits), _bits(values.to(tensor.device)), bits))
        return
    for part in _parts(tensor):
        part.masked_fill_(_mask(tensor, part), 0)
