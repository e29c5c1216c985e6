"""Unquantized weights, and how to see that weights which claim to be so are not.

A packed layout can hide behind a config that says nothing. Its tensors give it away: float8 or sub-byte dtypes, integer
parameters, integer matrices beside scales, wrapper subclasses.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchwcache.quantization.registry import refuse

__all__ = ["Unquantized", "check_module", "tensors_of"]

_ORDINARY = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
})  # fmt: skip
_FLOATING = frozenset(dtype for dtype in _ORDINARY if dtype.is_floating_point or dtype.is_complex)
_PACKED_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32})
# GPTQ/AWQ (qweight, qzeros), compressed-tensors (weight_packed), HQQ (W_q), AQLM (codes), QuIP# (Qidxs), bitsandbytes (quant_map)
_PACKED_NAME = re.compile(r"q_?weight|q_?zeros|.*packed.*|w_?q|weight_?q(uant(ized)?)?|codes|qidxs|quant_map|weight", re.IGNORECASE)
_SCALE_NAME = re.compile(
    r"(.*_)?(q|w|weight|input|act|activation|block|group)?_?(scales?|zeros?|zero_points?|qzeros|absmax|scale_inv|amax)(_?\d+)?",
    re.IGNORECASE,
)
# Learned temperatures and the like: scales, but not of packed weights.
_OTHER_SCALE = re.compile(r"logit_?scales?|layer_?scales?|attn_?scales?|embed_?scales?|softmax_?scales?", re.IGNORECASE)
_INDEX_NAME = re.compile(
    r".*(mask|ind(ex|ices|exes)|ids?|pos(ition)?s?|offsets?|table|lengths?|steps?|count|idx|map)$", re.IGNORECASE
)
_FOREIGN_PACKAGES = ("bitsandbytes", "torchao", "hqq", "auto_gptq", "gptqmodel", "awq", "quanto", "optimum.quanto", "aqlm", "eetq")
_QUANTIZED_MODULES = (*_FOREIGN_PACKAGES, "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


class Unquantized:
    """Weights in the dtype that they are computed in."""

    name = "unquantized"
    version = "1"
    evidence = "tests/process: attached against loaded, bit for bit, for plain modules and Transformers models of every kind"

    def accepts(self, quantization_config: Mapping[str, Any] | None) -> bool:
        """Only a config that states no quantization."""
        return not quantization_config

    def check_tensors(self, module: nn.Module, quantization_config: Mapping[str, Any] | None = None) -> None:
        """Refuse every sign of a quantized layout.

        Raises:
            UnsupportedQuantizationError: Names the first module or tensor that gives one away.
        """
        for path, child in module.named_modules():
            check_module(path, child)


def check_module(path: str, module: nn.Module, explained: Container[str] = ()) -> None:
    """Refuse every sign of a quantized layout in one module, without its children.

    Args:
        path: The module's name.
        module: The module.
        explained: Names of tensors that the caller knows about.

    Raises:
        UnsupportedQuantizationError: Names the first module or tensor that gives a layout away.
    """
    origin = type(module).__module__
    if _within(origin, _QUANTIZED_MODULES):
        raise refuse(f"{origin}.{type(module).__qualname__}", path, "the module's class belongs to a quantization package")
    packed: list[tuple[str, torch.Tensor]] = []
    for name, tensor, is_parameter in tensors_of(module):
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            _check_subclass(f"{path}.{name}".lstrip("."), tensor)
        if name in explained:
            continue
        dtype = tensor.dtype
        if dtype in _FLOATING or dtype is torch.bool or (dtype is torch.int64 and not is_parameter):
            continue
        where = f"{path}.{name}".lstrip(".")
        if tensor.is_quantized or dtype not in _ORDINARY:
            raise refuse(str(dtype).removeprefix("torch."), where, "the tensor has a quantized dtype, whatever its config says")
        if is_parameter:
            raise refuse(f"packed {dtype}", where, "an integer parameter holds packed weights")
        packed.append((name, tensor))
    if packed:
        _check_integers(path, module, packed)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Parameters, buffers and plain attributes of one module: name, tensor, whether it is a parameter."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, True
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer, False
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor):
            yield name, value, isinstance(value, nn.Parameter)


def _check_subclass(where: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    if _within(kind.__module__, _FOREIGN_PACKAGES) or is_traceable_wrapper_subclass(tensor) or _is_bitsandbytes(kind):
        raise refuse(f"{kind.__module__}.{kind.__qualname__}", where, "the tensor is a wrapper whose real content is elsewhere")


def _is_bitsandbytes(kind: type) -> bool:
    return any(base.__name__ in ("Params4bit", "Int8Params") for base in kind.__mro__)


def _check_integers(path: str, module: nn.Module, integers: list[tuple[str, torch.Tensor]]) -> None:
    """Tell packed weights from masks, positions and counters, which models hold as integer buffers too."""
    scales = [
        name
        for name, _, _ in tensors_of(module)
        if _SCALE_NAME.fullmatch(name) is not None and _OTHER_SCALE.fullmatch(name) is None
    ]
    for name, tensor in integers:
        where = f"{path}.{name}".lstrip(".")
        if tensor.dim() >= 1 and tensor.numel() > 1 and _PACKED_NAME.fullmatch(name) is not None:
            raise refuse(f"packed {tensor.dtype}", where, "by its name this integer buffer holds packed weights")
        beside = [scale for scale in scales if scale != name]
        is_matrix = tensor.dim() >= 2 and tensor.numel() > 1 and tensor.dtype in _PACKED_DTYPES
        if is_matrix and beside and _INDEX_NAME.fullmatch(name) is None:
            raise refuse(f"packed {tensor.dtype}", where, f"an integer matrix beside {beside[0]!r} holds packed weights")


@lru_cache(maxsize=4096)
def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)
