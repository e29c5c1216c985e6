"""Block FP8 in Transformers models, where Transformers itself has no way to compute with it.

On GPUs its own FP8 modules are used. Without one, Transformers dequantizes such a checkpoint while loading, with a warning only. So
on other devices its pipeline runs with a quantizer of ours, which puts our modules in place and is otherwise the same; afterwards
the model's config says what the checkpoint's says.

Importing this module registers the quantizer with Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import FineGrainedFP8Config, QuantizationMethod

from torchwcache.errors import BuildError, StateDictError, UnsupportedQuantizationError
from torchwcache.loaders.safetensors_file import SafetensorsCheckpoint
from torchwcache.quantization import block_fp8
from torchwcache.quantization.block_fp8_config import BlockFP8Settings
from torchwcache.quantization.block_fp8_layers import BlockFP8Experts, BlockFP8Linear
from torchwcache.quantization.registry import refuse

__all__ = ["disagreement", "prepare_build", "quantization_argument", "set_on_config"]

NAME = "torchwcache_fp8"
_WEIGHTS = ("weight", "gate_up_proj", "down_proj")
_QUANTIZES_SINCE = (5, 24)
"""The oldest release that quantizing at load was run with; with 5.17 its loading code fails. Tested with both."""


@register_quantization_config(NAME)
class BlockFP8LoadingConfig(FineGrainedFP8Config):
    """What our quantizer is told. Only in use during a load.

    Args:
        original: The checkpoint's own ``quantization_config``; ``None`` when it is quantized at load.
        scale_name: What the checkpoint calls the scales.
        **kwargs: As for ``FineGrainedFP8Config``.
    """

    def __init__(self, original: Mapping[str, Any] | None = None, scale_name: str = "weight_scale_inv", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.original, self.scale_name = original, scale_name


class BlockFP8Quantize(ConversionOps):
    """Makes weight and scales of a weight."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Quantize what is about to become a parameter."""
        result: dict[str, torch.Tensor] = {}
        for key, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            module, name = get_module_from_name(model, key)
            if name == "gate_up_proj":
                pair = BlockFP8Experts.quantize_gate_up(tensor, module.block_size)
            else:
                pair = block_fp8.quantize_block_fp8(tensor, module.block_size)
            result[key], result[f"{key}_scale_inv"] = pair
        return result


@register_quantizer(NAME)
class BlockFP8Quantizer(FineGrainedFP8HfQuantizer):
    """As its base, with modules that run anywhere, and without dequantizing."""

    quantization_config: Any

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """No GPU is needed, but a release whose loading code takes quantized tensors from us."""
        release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        if not self.pre_quantized and release < _QUANTIZES_SINCE:
            raise BuildError(
                f"quantizing at load needs Transformers {'.'.join(map(str, _QUANTIZES_SINCE))} or newer, this is "
                f"{transformers.__version__}; a checkpoint that is quantized already loads with this one, too"
            )

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Weights of our modules, in a checkpoint that is not quantized."""
        module, name = get_module_from_name(model, param_name)
        return not self.pre_quantized and isinstance(module, (BlockFP8Linear, BlockFP8Experts)) and name in _WEIGHTS

    def get_quantize_ops(self) -> ConversionOps:
        """What is run for each such weight."""
        return BlockFP8Quantize(self)

    def update_weight_conversions(self, weight_conversions: Any, *model: Any) -> Any:
        """The base's, and the name that compressed-tensors has for scales. Newer releases pass the model, too."""
        updated = super().update_weight_conversions(weight_conversions, *model)  # type: ignore[no-untyped-call]
        if getattr(self, "scale_name", None) == "weight_scale":
            updated = [WeightRenaming(r"\.weight_scale(?!_inv)", ".weight_scale_inv"), *updated]
        return updated

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        self.scale_name = config.scale_name
        if hasattr(self, "_normalize_modules_to_not_convert"):  # newer releases rename released lists to the model's own names
            self._normalize_modules_to_not_convert(model)
        stay = self.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
        small = _replace(model, stay, tuple(config.weight_block_size), pre_quantized=self.pre_quantized)
        self.modules_to_not_convert = sorted({*stay, *small})

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Give the model the marks that Transformers' own quantizer leaves."""
        config, original = self.quantization_config, self.quantization_config.original
        if original is None:
            stated: Any = _stated(tuple(config.weight_block_size), self.modules_to_not_convert)
        elif original.get("quant_method") == "fp8":
            stated = FineGrainedFP8Config.from_dict(dict(original))  # type: ignore[no-untyped-call]
        else:
            stated = dict(original)
        model.config.quantization_config = stated
        self.quantization_config = stated if isinstance(stated, FineGrainedFP8Config) else FineGrainedFP8Config()
        method = stated["quant_method"] if isinstance(stated, dict) else QuantizationMethod.FP8
        model.quantization_method = method
        if not self.pre_quantized and "_weight_conversions" in model.__dict__:
            _convert_scales_too(model, self)
        for child in model.modules():
            if isinstance(child, (BlockFP8Linear, BlockFP8Experts)):
                for name in child.float8_names:
                    child.get_parameter(name).requires_grad_(False)
                    child.get_parameter(f"{name}_scale_inv").requires_grad_(False)
        return model


def _stated(block: tuple[int, int], left_out: list[str] | None) -> FineGrainedFP8Config:
    # A list, as it is read back from JSON.
    return FineGrainedFP8Config(weight_block_size=list(block), modules_to_not_convert=left_out)  # type: ignore[arg-type]


def _convert_scales_too(model: Any, quantizer: BlockFP8Quantizer) -> None:
    """Have ``save_pretrained`` take the scales apart as it does the weights, although no scales were read."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    used = {tuple(conversion._original_source_patterns) for conversion in model._weight_conversions}
    for conversion in get_model_conversion_mapping(model, None, quantizer):
        sources = tuple(conversion._original_source_patterns)
        weights = tuple(source.removesuffix("_scale_inv") for source in sources)
        if weights != sources and weights in used:
            conversion._was_used = True
            model._weight_conversions.append(conversion)


def _replace(model: Any, stay: list[str], block: tuple[int, int], *, pre_quantized: bool) -> list[str]:
    """Put our modules in place; returns the names of layers that are too small, which stay when they are quantized at load."""
    small = []
    for path, module in list(model.named_modules()):
        if not should_convert_module(path, stay):
            continue
        try:
            made = _counterpart(path, module, block)
        except UnsupportedQuantizationError:
            raise
        except ValueError as error:
            if pre_quantized:
                raise refuse("fp8", path, str(error)) from error
            small.append(path)
            continue
        if made is not None:
            model.set_submodule(path, made.train(module.training))
    return small


def _counterpart(path: str, module: nn.Module, block: tuple[int, int]) -> nn.Module | None:
    if type(module) is nn.Linear:
        return BlockFP8Linear(
            module.in_features,
            module.out_features,
            module.bias is not None,
            block_size=block,
            device="meta",
            dtype=module.weight.dtype,
        )
    fused = module._parameters.get("gate_up_proj")
    if not path.endswith(".experts") or fused is None:
        return None
    usual = getattr(module, "has_gate", True) and getattr(module, "is_concatenated", True)
    unusual = any(getattr(module, flag, False) for flag in ("has_bias", "is_transposed", "has_post_expert_norm"))
    if not usual or unusual or _has_own_gate(type(module)) or fused.dim() != 3:
        raise refuse("fp8", path, f"experts of the kind {type(module).__qualname__} are not verified")
    experts, twice, hidden = fused.shape
    act_fn: Any = module.act_fn
    return BlockFP8Experts(experts, hidden, twice // 2, act_fn, block_size=block, device="meta")


def _has_own_gate(kind: type) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    return getattr(kind, "_apply_gate", _default_apply_gate) is not _default_apply_gate


# ---- what the loader uses ----------------------------------------------------------------------------------------------------


def _is_ours(device: str) -> bool:
    return torch.device(device).type != "cuda"


def quantization_argument(settings: BlockFP8Settings, device: str) -> Any:
    """The ``quantization_config`` to pass to ``from_pretrained`` for quantizing at load."""
    left_out = None if settings.left_out is None else list(settings.left_out)
    if not _is_ours(device):
        return _stated(settings.block, left_out)
    return BlockFP8LoadingConfig(weight_block_size=list(settings.block), modules_to_not_convert=left_out, quant_method=NAME)


def set_on_config(config: Any, settings: BlockFP8Settings, stated: Mapping[str, Any], device: str) -> None:
    """Make ``from_pretrained`` take our quantizer for a checkpoint that is quantized."""
    if _is_ours(device):
        config.quantization_config = {
            "quant_method": NAME,
            "weight_block_size": list(settings.block),
            "modules_to_not_convert": None if settings.left_out is None else list(settings.left_out),
            "scale_name": settings.scale_name,
            "original": dict(stated),
        }


def prepare_build(model: Any, settings: BlockFP8Settings, stated: Mapping[str, Any] | None, device: str) -> None:
    """Do to a model without weights what ``from_pretrained`` does to it for the quantization.

    Raises:
        UnsupportedQuantizationError: A layer is not of a kind that is verified, or smaller than a block; names it.
        BuildError: Transformers cannot do it.
    """
    if settings.at_load:
        wanted = quantization_argument(settings, device)
    else:
        set_on_config(model.config, settings, stated or {}, device)
        wanted = model.config.quantization_config
    try:
        quantizer = AutoHfQuantizer.from_config(wanted, pre_quantized=not settings.at_load)
        quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None, checkpoint_files=None, use_kernels=False)
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    except (ImportError, AttributeError, TypeError) as error:
        raise BuildError(f"{type(model).__qualname__} cannot be made an fp8 model: {type(error).__name__}: {error}") from error


def disagreement(checkpoint: SafetensorsCheckpoint, settings: BlockFP8Settings) -> str | None:
    """Why a checkpoint whose config says fp8 does not hold block FP8 weights, by its headers; ``None`` when it does.

    Raises:
        StateDictError: A float8 weight has no scales, so that nobody can tell what it means.
    """
    names = [name for name in checkpoint.names() if checkpoint.info(name).dtype is block_fp8.FLOAT8]
    if not names:
        return "the config says fp8, but no tensor of the checkpoint is float8"
    bare = [name for name in names if not any(scales in checkpoint for scales in _names_of_scales(name))]
    if bare:
        shown = ", ".join(bare[:10]) + (f" and {len(bare) - 10} more" if len(bare) > 10 else "")
        raise StateDictError(
            f"{checkpoint.paths[0].parent}: these float8 weights have no scales: {shown}. Complete or convert the checkpoint",
            missing=[f"{name}_scale_inv" for name in bare],
        )
    for name in names:
        try:
            block_fp8.check_block(settings.block, checkpoint.info(name).shape)
        except (ValueError, IndexError) as error:
            return f"{name}: {error}"
    return None


def _names_of_scales(weight: str) -> tuple[str, ...]:
    stem = weight.rpartition(".")[0]
    return f"{weight}_scale_inv", f"{weight}_scale", f"{stem}.scale", f"{stem}.qscale_weight"
