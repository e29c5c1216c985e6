"""What a ``quantization_config`` says about block-wise FP8, in every layout that it is written in. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchwcache.config import ModelConfig
from torchwcache.errors import ConfigError

__all__ = ["BlockFP8Settings", "problem_of", "requested_settings", "settings_of"]

METHOD = "fp8"
_OPTIONS = frozenset({"quant_method", "weight_block_size", "modules_to_not_convert", "activation_scheme"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFP8Settings:
    """How the layers of a model are, or are to be, quantized.

    Attributes:
        block: Rows and columns of a block.
        left_out: Names or patterns of modules that stay as they are; ``None`` says nothing about it, and the usual ones do.
        at_load: The checkpoint is not quantized yet.
        scale_name: What the checkpoint calls the scales of ``weight``.
    """

    block: tuple[int, int]
    left_out: tuple[str, ...] | None
    at_load: bool = False
    scale_name: str = "weight_scale_inv"

    def identity(self) -> dict[str, Any]:
        """What of it decides the finished bytes."""
        return {"method": METHOD, "block": self.block, "left_out": self.left_out, "at_load": self.at_load}


def name_of(config: Mapping[str, Any]) -> str:
    """The ``quant_method``, as text in lower case."""
    name = config.get("quant_method", "")
    return str(getattr(name, "value", name)).lower()


def problem_of(config: Mapping[str, Any]) -> str | None:
    """Why a config is not one of block-wise FP8 as it is verified, or ``None`` when it is."""
    name = name_of(config)
    if name == METHOD:
        return _problem_of_fp8(config)
    if name == "compressed-tensors":
        return _problem_of_compressed_tensors(config)
    return f"{name or 'an unnamed method'} is not block-wise FP8"


def _problem_of_fp8(config: Mapping[str, Any]) -> str | None:
    if config.get("weight_block_size") is None:
        return "it gives no weight_block_size, so each weight has one scale for the whole tensor, or none that is known"
    if (problem := _problem_of_block(config["weight_block_size"], "weight_block_size")) is not None:
        return problem
    if str(config.get("activation_scheme", "dynamic")).lower() != "dynamic":
        return f"activation_scheme={config['activation_scheme']!r}: fixed scales of activations are not verified"
    if str(config.get("fmt") or "e4m3").lower() not in ("e4m3", "e4m3fn"):
        return f"fmt={config['fmt']!r}: only float8_e4m3fn weights are verified"
    if config.get("scale_fmt") not in (None, "float"):
        return f"scale_fmt={config['scale_fmt']!r}: only float32 scales are verified"
    if config.get("expert_dtype") not in (None, "fp8"):
        return f"expert_dtype={config['expert_dtype']!r}: only float8 experts are verified"
    if config.get("modules_to_convert"):
        return "modules_to_convert: layers with one scale for the whole tensor are not verified"
    if config.get("dequantize"):
        return "dequantize=True: the config says fp8 and the finished model is not; dequantize the checkpoint itself instead"
    return None


def _problem_of_block(block: object, what: str) -> str | None:
    if isinstance(block, (list, tuple)) and len(block) == 2 and all(type(size) is int and size >= 1 for size in block):
        return None
    return f"{what}={block!r} is not two positive integers"


def _problem_of_compressed_tensors(config: Mapping[str, Any]) -> str | None:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "it names no config_groups, so nobody can tell how the weights are quantized"
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            return f"config group {name!r} does not say how the weights are quantized"
        if (problem := _problem_of_group(group)) is not None:
            return f"config group {name!r}: {problem}"
    if len({tuple(group["weights"]["block_structure"]) for group in groups.values()}) > 1:
        return "its config groups have different blocks, which is not verified"
    if config.get("kv_cache_scheme"):
        return "kv_cache_scheme: a quantized KV cache with scales in the checkpoint is not verified"
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"sparsity_config: format {sparsity['format']!r} is not verified"
    if config.get("transform_config"):
        return "transform_config: transformed weights are not verified"
    return None


def _problem_of_group(group: Mapping[str, Any]) -> str | None:
    weights = group["weights"]
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        return f"weights of {weights.get('num_bits')} bits of type {weights.get('type')!r} are not float8"
    if weights.get("strategy") != "block":
        return f"weights with strategy {weights.get('strategy')!r} are not block-wise"
    if (problem := _problem_of_block(weights.get("block_structure"), "block_structure")) is not None:
        return problem
    if not weights.get("symmetric", True) or weights.get("dynamic") or weights.get("actorder"):
        return "weights with zero points, dynamic scales or a reordering are not verified"
    inputs = group.get("input_activations")
    if isinstance(inputs, Mapping) and not inputs.get("dynamic"):
        return "fixed scales of activations are not verified"
    if group.get("output_activations"):
        return "quantized outputs are not verified"
    if group.get("targets") != ["Linear"]:
        return f"targets {group.get('targets')!r}: only groups of all linear layers are verified"
    return None


def settings_of(config: Mapping[str, Any]) -> BlockFP8Settings:
    """The settings that a config states; :func:`problem_of` has nothing against it."""
    if name_of(config) == METHOD:
        left_out = config.get("modules_to_not_convert", config.get("ignored_layers"))
        rows, columns = config["weight_block_size"]
        return BlockFP8Settings(block=(rows, columns), left_out=None if left_out is None else tuple(map(str, left_out)))
    group = next(iter(config["config_groups"].values()))
    rows, columns = group["weights"]["block_structure"]
    left_out = tuple(_pattern(str(entry)) for entry in config.get("ignore") or ())
    return BlockFP8Settings(block=(rows, columns), left_out=left_out, scale_name="weight_scale")


def _pattern(entry: str) -> str:
    """An entry of compressed-tensors' ``ignore`` as Transformers' patterns have it: an exact name, or ``re:`` and an expression."""
    return entry.removeprefix("re:") if entry.startswith("re:") else f"^{re.escape(entry)}$"


def requested_settings(cfg: ModelConfig, stated: Mapping[str, Any] | None) -> BlockFP8Settings | None:
    """What is to be done about block FP8 in a load of this model: what its checkpoint states, or what the user asks for.

    Args:
        cfg: The user's config.
        stated: The quantization that the checkpoint's config states, or ``None``.

    Returns:
        ``None`` when the model is not block FP8, or not in a verified way: the gate says which.

    Raises:
        ConfigError: ``ModelConfig.quantization_config`` is wrong, or is given for a checkpoint that is quantized already.
    """
    if cfg.quantization not in (None, METHOD):
        return None
    if stated:
        if cfg.quantization_config and cfg.quantization == METHOD:
            raise ConfigError(
                f"quantization_config says how to quantize at load, but {cfg.checkpoint} is quantized already; leave it out"
            )
        return settings_of(stated) if problem_of(stated) is None else None
    if cfg.quantization is None:
        return None
    return asked_settings({"weight_block_size": (128, 128), **cfg.quantization_config}, "quantization_config")


def asked_settings(config: Mapping[str, Any], where: str) -> BlockFP8Settings:
    """The settings that a user asks for, for a checkpoint that is not quantized.

    Raises:
        ConfigError: They are wrong.
    """
    unknown = sorted(set(config) - _OPTIONS)
    if unknown:
        raise ConfigError(f"{where}: {METHOD} has no option {', '.join(unknown)}; it has {', '.join(sorted(_OPTIONS))}")
    problem = problem_of({"quant_method": METHOD, **config})
    left_out = config.get("modules_to_not_convert")
    if problem is None and not (left_out is None or (isinstance(left_out, (list, tuple)) and all(map(_is_text, left_out)))):
        problem = f"modules_to_not_convert={left_out!r} is not a list of names"
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")
    rows, columns = config["weight_block_size"]
    return BlockFP8Settings(block=(rows, columns), left_out=None if left_out is None else tuple(left_out), at_load=True)


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value != "" and bool(re.compile(value))
    except re.error:
        return False
