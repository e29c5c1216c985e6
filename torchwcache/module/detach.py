"""Detach: after its attachment is closed, a module must say so when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from torchwcache.errors import DetachedError
from torchwcache.module.replace import replace_tensors

__all__ = ["DetachedTensor", "detach"]


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


def detach(module: nn.Module) -> None:
    """Replace every tensor in a module. Tensors that the caller kept stay valid, and keep their memory mapped."""
    stand_in = torch.Tensor._make_subclass(DetachedTensor, torch.empty(0, device="meta"))

    def new(tensor: torch.Tensor, _: str) -> torch.Tensor:
        return stand_in

    replace_tensors(module, new)
