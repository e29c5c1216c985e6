"""What a build allocates, as part of a model's identity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import nn

from torchwcache.module.graph import ATOMIC_TYPES

__all__ = ["shapes_digest"]

_NOTHING = frozenset({*ATOMIC_TYPES, OrderedDict, set})
"""Types of attributes in which no tensors are looked for."""


def shapes_digest(module: nn.Module) -> str:
    """Digest of names, shapes and dtypes of all tensors of a module: parameters, buffers, and those that are plain attributes.

    An engine's option that is not part of the identity may still decide how large something is, such as a buffer for as many tokens
    as are batched: in the module of a start with another value it would be too small, and a kernel would write past its end.
    """
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if type(value) in _NOTHING or name in ("_parameters", "_buffers", "_modules"):
                continue  # nearly all that a module has: a large model has a million of these
            tensors += _plain(f"{path}.{name}", value)
    lines = sorted(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors)
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def _plain(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, and those that a container holds directly."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) in (list, tuple):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value) if isinstance(item, torch.Tensor))
    elif type(value) is dict:
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items() if isinstance(item, torch.Tensor))
