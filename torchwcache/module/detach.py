"""Detach: after its attachment is closed, a module must say so when it is used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from torchwcache.errors import DetachedError
from torchwcache.module.replace import iter_tensors, replace_tensors

__all__ = ["DetachedTensor", "detach", "outside_tables"]


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
    stand_in = torch.Tensor._make_subclass(DetachedTensor, torch.empty(0, device="meta"))
    alive = [tensor for ref in (outside_tables(module) if plain is None else plain) if (tensor := ref()) is not None]
    own = {id(tensor): tensor for tensor in (*alive, *_in_tables(module))}

    def new(tensor: torch.Tensor, _: str) -> torch.Tensor | None:
        return stand_in if id(tensor) in own else None

    replace_tensors(module, new, hooks=False)


def _in_tables(module: nn.Module) -> Iterator[torch.Tensor]:
    for item in module.modules():
        for table in (item._parameters, item._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)
