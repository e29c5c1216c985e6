"""Detach: after its attachment is closed, a module must say so when it is used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from torchwcache.errors import DetachedError
from torchwcache.module.replace import iter_tensors, replace_tensors

if TYPE_CHECKING:
    from torchwcache.memory.base import MappedSegment

__all__ = ["DetachedTensor", "detach", "detach_mapped", "outside_tables"]


class DetachedTensor(torch.Tensor):
    """Stands where a tensor of an attached module was. Every use of it raises :class:`DetachedError`."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Refuse."""
        raise DetachedError(
            "this module's attachment was closed: its weights are no longer mapped. Use the model inside "
            "`with WeightCache.attach(cfg) as model:`, or keep the Attachment open for as long as you need it"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "DetachedTensor()"


def outside_tables(module: nn.Module) -> list[weakref.ref[torch.Tensor]]:
    """The tensors that a module holds now, but for parameters and buffers of its tree: what an attach put there."""
    tables = {id(tensor) for tensor in _in_tables(module)}
    return [weakref.ref(tensor) for _, tensor in iter_tensors(module).values() if id(tensor) not in tables]


def detach(module: nn.Module, plain: Sequence[weakref.ref[torch.Tensor]] | None = None) -> None:
    """Take a module's tensors away: parameters and buffers, and plain tensors that came with it, wherever the module has them.

    A module leads to much that is not its own: a hook to whoever registered it and to what that recorded, an attribute to an object
    that other models share. Tensors there stay, as do those that the caller kept.

    Args:
        module: Changed in place.
        plain: From :func:`outside_tables`, at the time of the attach; by default all that the module holds now.
    """
    alive = [tensor for ref in (outside_tables(module) if plain is None else plain) if (tensor := ref()) is not None]
    own = {id(tensor): tensor for tensor in (*alive, *_in_tables(module))}
    _take_away(module, lambda tensor: id(tensor) in own)


def detach_mapped(module: nn.Module, segments: Sequence[MappedSegment]) -> None:
    """Take away what lies in mapped segments, and nothing else: of a module that was never handed out.

    It may share the rest with modules that are in use: those of an engine all lead to the engine's configuration, and that to them.

    Args:
        module: Changed in place.
        segments: Whose memory is to be given back.
    """
    ranges = [(start, start + segment.nbytes) for segment in segments if (start := _start(segment))]

    def is_mapped(tensor: torch.Tensor) -> bool:
        address = _address(tensor)
        return any(start <= address < end for start, end in ranges)

    if ranges:
        with torch._C.DisableTorchFunction():
            _take_away(module, is_mapped)


def _take_away(module: nn.Module, which: Callable[[torch.Tensor], bool]) -> None:
    stand_in = torch.Tensor._make_subclass(DetachedTensor, torch.empty(0, device="meta"))
    replace_tensors(module, lambda tensor, _: stand_in if which(tensor) else None, hooks=False)


def _start(segment: MappedSegment) -> int:
    return segment.address or segment.tensor(0, 1, torch.uint8).data_ptr()


def _address(tensor: torch.Tensor) -> int:
    try:
        return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except RuntimeError:  # it has no storage, as a sparse one: its parts have
        return 0


def _in_tables(module: nn.Module) -> Iterator[torch.Tensor]:
    for item in module.modules():
        for table in (item._parameters, item._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)
