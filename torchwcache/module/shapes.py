"""What a build allocates, as part of a model's identity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import nn

from torchwcache.module.graph import ATOMIC_TYPES, children, is_leaf, type_name

__all__ = ["shapes_digest"]

_NOTHING = frozenset({*ATOMIC_TYPES, set})
"""Types of attributes in which no tensors are looked for."""

_STEPS = frozenset({"attribute", "slot", "key", "index", "partial_arg", "partial_keyword"})
"""What is followed: not what functions and methods close over, which leads into all the program."""

_MAX_DEPTH = 8


def shapes_digest(module: nn.Module) -> str:
    """Digest of names, shapes and dtypes of all tensors of a module: parameters, buffers, and those that are plain attributes.

    An engine's option that is not part of the identity may still decide how large something is, such as a buffer for as many tokens
    as are batched: in the module of a start with another value it would be too small, and a kernel would write past its end.
    Wherever a tensor is held it is replaced by the published one, so plain objects and containers are looked into, too.
    """
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    seen: set[int] = set()
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            kind = type(value)
            if kind in _NOTHING or (kind is OrderedDict and not value) or name in ("_parameters", "_buffers", "_modules"):
                continue  # nearly all that a module has: a large model has a million of these
            tensors += _held(f"{path}.{name}", value, seen, 0)
    lines = sorted(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors)
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def _held(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, and those that a container or a plain object holds; what several hold is looked at once."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth > _MAX_DEPTH or isinstance(value, nn.Module) or is_leaf(value) or id(value) in seen:
        return
    seen.add(id(value))
    for kind, key, item in children(value):
        if kind in _STEPS and type(item) not in ATOMIC_TYPES:
            # The text of other keys may hold an address, which is another one in the next process.
            step = repr(key) if type(key) in (str, int) else type_name(type(key))
            yield from _held(f"{path}[{step}]", item, seen, depth + 1)
