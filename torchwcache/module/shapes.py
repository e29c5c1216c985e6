"""What a build allocates, as part of a model's identity."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import nn

from torchwcache.module.graph import ATOMIC_TYPES, HOOK_DICTS, children, is_leaf, type_name

__all__ = ["shapes_digest"]

_NOTHING = frozenset({*ATOMIC_TYPES, set})
"""Types of attributes in which no tensors are looked for."""

_STEPS = frozenset({"attribute", "slot", "key", "index", "partial_arg", "partial_keyword"})
"""What is followed: not what functions and methods close over, which leads into all the program."""

_PROGRAM = "__globals__"
"""Where a Triton kernel keeps the globals of its function, another process's caches among them."""

_MAX_DEPTH = 8
_MAX_INDEX = 1 << 16
"""Ints beyond are no positions or numbers of layers: ``id()``, for instance."""


def shapes_digest(module: nn.Module) -> str:
    """Digest of names, shapes and dtypes of all tensors of a module: parameters, buffers, and those that are plain attributes.

    An engine's option that is not part of the identity may still decide how large something is, such as a buffer for as many tokens
    as are batched: in the module of a start with another value it would be too small, and a kernel would write past its end.
    Wherever a tensor is held it is replaced by the published one, so plain objects and containers are looked into, too.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    seen: dict[int, tuple[Any, int]] = {}
    known: set[int] = set()
    roots = [("", module)]
    while roots:
        at, root = roots.pop()
        if id(root) in known:
            continue
        modules = [(path, child) for path, child in root.named_modules(prefix=at) if id(child) not in known]
        known.update(id(child) for _, child in modules)
        tensors += root.named_parameters(prefix=at, remove_duplicate=False)
        tensors += root.named_buffers(prefix=at, remove_duplicate=False)
        for path, child in modules:
            for name, value in vars(child).items():
                kind = type(value)
                if kind in _NOTHING or (kind is OrderedDict and not value) or name in ("_parameters", "_buffers", "_modules"):
                    continue  # nearly all that a module has: a large model has a million of these
                if name in HOOK_DICTS and isinstance(value, dict):  # their keys come from a counter of the process
                    for i, hook in enumerate(value.values()):
                        tensors += _held(f"{path}.{name}[{i}]", hook, seen, 0)
                else:
                    tensors += _held(f"{path}.{name}", value, seen, 0)
                    roots += _unregistered(f"{path}.{name}", value)
    lines = sorted(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors)
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def _unregistered(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, nn.Module]]:
    """Modules that an attribute holds otherwise than torch would, in lists and the like; also those that are registered elsewhere.

    Plain objects are not entered: an engine's configuration leads to the layers of all its models.
    """
    kind = type(value)
    if kind in (list, tuple, dict, OrderedDict):
        for i, item in enumerate(value if kind in (list, tuple) else value.values()) if depth <= _MAX_DEPTH else ():
            yield from _unregistered(f"{path}[{i}]", item, depth + 1)
    elif kind not in weakref.ProxyTypes and isinstance(value, nn.Module):
        yield path, value


def _held(path: str, value: Any, seen: dict[int, tuple[Any, int]], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, and those that a container or a plain object holds.

    What several hold is looked at once, but for what lay too deep the first time: of that not everything was seen.

    Args:
        path: To the value.
        value: Anything.
        seen: Objects by ``id``, kept so that their ids stay their own, and how deep they were.
        depth: How deep this one is.
    """
    if type(value) in weakref.ProxyTypes:  # before anything asks for its class: what it stands for may be gone
        return
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth > _MAX_DEPTH or isinstance(value, nn.Module) or is_leaf(value):
        return
    if id(value) in seen and seen[id(value)][1] <= depth:
        return
    seen[id(value)] = value, depth
    for kind, key, item in children(value):
        if kind in _STEPS and type(item) not in ATOMIC_TYPES and not (kind == "attribute" and key == _PROGRAM):
            # The text of other keys may hold an address, which is another one in the next process.
            named = type(key) is str or (type(key) is int and 0 <= key < _MAX_INDEX)
            yield from _held(f"{path}[{repr(key) if named else type_name(type(key))}]", item, seen, depth + 1)
