"""Why the methods that are known, and not on the list, are not. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchwcache.quantization.block_fp8_config import name_of, problem_of

__all__ = ["reason_of"]

_PACKED = "its weights are packed integers, whose repacking for a kernel cannot be seen in the tensors"
_PER_TENSOR = "its float8 weights have one scale per tensor or per channel, not one per block"
_FOUR_BITS = "its weights are packed to four bits"
_CODEBOOK = "its weights are indices into codebooks"
_WRAPPED = "its weights are tensor subclasses, whose real content is elsewhere"
_REASONS = {
    "aqlm": _CODEBOOK,
    "auto-round": _PACKED,
    "autoround": _PACKED,
    "awq": _PACKED,
    "awq_marlin": _PACKED,
    "bitblas": _PACKED,
    "bitnet": _PACKED,
    "bitsandbytes": "its weights are packed, with their state in Python objects beside them",
    "eetq": _PACKED,
    "fbgemm_fp8": _PER_TENSOR,
    "fp8_marlin": "its weights were repacked for a kernel",
    "fp_quant": _FOUR_BITS,
    "gguf": "its weights are GGUF blocks of many kinds",
    "gptq": _PACKED,
    "gptq_bitblas": _PACKED,
    "gptq_marlin": _PACKED,
    "gptq_marlin_24": _PACKED,
    "higgs": _CODEBOOK,
    "hqq": _PACKED,
    "marlin": "its weights were repacked for a kernel",
    "modelopt": "its layouts (FP8 with one scale per tensor, NVFP4) are not block-wise FP8",
    "modelopt_fp4": _FOUR_BITS,
    "mxfp4": _FOUR_BITS,
    "mxfp8": "its scales are powers of two in eight bits, not float32",
    "nvfp4": _FOUR_BITS,
    "petit_nvfp4": _FOUR_BITS,
    "ptpc_fp8": _PER_TENSOR,
    "quanto": _WRAPPED,
    "quark": "its layouts (per tensor, per channel, four bits) are not block-wise FP8",
    "spqr": _PACKED,
    "torchao": _WRAPPED,
    "vptq": _CODEBOOK,
}
_UNKNOWN = "nobody has verified it: it is not on the list of methods that may be cached"


def reason_of(quantization_config: Mapping[str, Any] | None) -> str:
    """Why a config is refused."""
    if not quantization_config:
        return _UNKNOWN
    name = name_of(quantization_config)
    if name in ("fp8", "compressed-tensors"):
        return problem_of(quantization_config) or _UNKNOWN
    if not name and any(quantization_config.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        name = "bitsandbytes"
    return _REASONS.get(name, _UNKNOWN)
