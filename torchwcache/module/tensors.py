"""The table of tensor objects of one module state: what they are, and whether they can be carried."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchwcache.manifest import ITEMSIZE
from torchwcache.module.graph import type_name
from torchwcache.module.storages import dtype_name

__all__ = ["TensorRole", "TensorTable", "class_name_of", "is_host_copy", "unsupported_tensor"]

TensorRole: TypeAlias = Literal["parameter", "buffer", "plain"]


def class_name_of(tensor: torch.Tensor) -> str:
    """The class as a manifest names it (``TensorSpec.cls``)."""
    cls = type(tensor)
    if cls is torch.Tensor:
        return ""
    return "Parameter" if cls is nn.Parameter else type_name(cls)


def is_host_copy(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor that is no parameter lies in host memory, and the entry on a device: each client gets a copy of it."""
    return device.type != "cpu" and tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter)


def unsupported_tensor(tensor: torch.Tensor, device: torch.device) -> str | None:
    """Why a tensor cannot be carried in a segment on ``device``, or ``None`` when it can."""
    if is_lazy(tensor):
        return "it is still uninitialized: run the module once, or give it its shape, before publishing"
    if is_traceable_wrapper_subclass(tensor):
        return f"it is a {type(tensor).__name__}, a tensor made of other tensors"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; only strided tensors have bytes of their own"
    if tensor.is_meta:
        return "it is still on the meta device after loading: nothing gave it a value"
    if tensor.is_quantized:
        return f"it is a quantized tensor ({tensor.dtype}), whose scale and zero point lie outside its bytes"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.device != device and not is_host_copy(tensor, device):
        return f"it lives on {tensor.device}, the entry on {device}"
    if dtype_name(tensor.dtype) not in ITEMSIZE:
        return f"its dtype {tensor.dtype} is not known to the manifest"
    if tensor.is_leaf and tensor.grad is not None:
        return "it has a gradient: call zero_grad(set_to_none=True) before publishing"
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        return "it has hooks on its gradient, which cannot be carried: register them after attaching"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"{type(tensor).__name__} has a __torch_dispatch__ of its own"
    return None


class TensorTable:
    """Every distinct tensor object, in the order in which it was first seen.

    Attributes:
        tensors: The tensor objects; index in this list is the index in the manifest.
        roles: For each, every role it was seen in.
        paths: For each, every path it was seen at.
        problems: ``(path, reason)`` for tensors that cannot be carried.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self.roles: list[set[TensorRole]] = []
        self.paths: list[list[str]] = []
        self.problems: list[tuple[str, str]] = []
        self._index: dict[int, int] = {}

    def add(self, tensor: torch.Tensor, path: str, role: TensorRole) -> int:
        """Register a tensor found at ``path``; returns its index."""
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.roles.append(set())
            self.paths.append([])
            reason = unsupported_tensor(tensor, self.device)
            if reason is not None:
                self.problems.append((path, reason))
        self.roles[index].add("parameter" if isinstance(tensor, nn.Parameter) else role)
        self.paths[index].append(path)
        return index

    def index(self, tensor: torch.Tensor) -> int:
        """Index of a tensor that was registered."""
        return self._index[id(tensor)]

    def is_constant(self, index: int, patterns: Sequence[str]) -> bool:
        """Whether the adapter or the user declared this tensor constant."""
        return any(fnmatch.fnmatchcase(path, pattern) for path in self.paths[index] for pattern in patterns)

    def decide_sharing(self, members: Iterable[int], constants: Sequence[str]) -> tuple[bool, list[tuple[str, str]]]:
        """Whether the storage that these tensors view is shared (design D9), and what speaks against it."""
        members = list(members)
        if self.tensors[members[0]].device != self.device:
            return False, []  # in host memory, where segments on a device cannot be mapped
        parameters = [i for i in members if "parameter" in self.roles[i]]
        mutable = [i for i in members if "parameter" not in self.roles[i] and not self.is_constant(i, constants)]
        if not parameters:
            return not mutable, []
        problems = [
            (
                self.paths[i][0],
                f"this buffer views the memory of parameter {self.paths[parameters[0]][0]}, which is shared read-only; declare it "
                f"constant (ModelConfig(constants=[...])) if nothing writes to it, or give it memory of its own",
            )
            for i in mutable
            if "buffer" in self.roles[i]
        ]
        return True, problems
