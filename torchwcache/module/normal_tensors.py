"""Tensors that can be used anywhere, made in whatever mode the caller is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["normal_tensors"]


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Leave inference mode, and nothing else: ``torch.no_grad`` stays in force.

    A model is what it is whoever asks for it. What is made in inference mode could never take part in autograd outside of it, and
    this module may be attached inside of one ``with torch.inference_mode():`` and used outside.
    """
    grad = torch.is_grad_enabled()  # leaving inference mode would turn it on
    with torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
        yield
