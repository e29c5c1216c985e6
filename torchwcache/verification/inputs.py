"""Something to feed a model with, the same in every process, and its answer in digests."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchwcache.errors import CheckpointError, ConfigError
from torchwcache.module.construct import resolve_callable
from torchwcache.module.storages import dtype_name
from torchwcache.verification.description import OutputFacts
from torchwcache.verification.digests import digest_of_tensor

__all__ = ["SEED", "describe_outputs", "generate_inputs", "inputs_from"]

SEED = 20240229
_BATCH, _TOKENS = 2, 12


def inputs_from(source: str | None, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for ``model``.

    Args:
        source: A safetensors file of tensors named like the arguments; ``"module:function"``, a function of the model that returns
            a dict of keyword arguments, or a tuple of positional ones; or ``None`` to generate them.
        model: Gets them.

    Raises:
        ConfigError: They cannot be made.
    """
    if source is None:
        return (), generate_inputs(model)
    if os.path.exists(source):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return (), dict(load_file(source, device=str(_device(model))))
        except SafetensorError as error:
            raise CheckpointError(f"{source}: not a safetensors file: {error}") from error
    if ":" not in source:
        raise ConfigError(f'inputs {source!r}: neither a file nor "package.module:name"')
    torch.manual_seed(SEED)
    made = resolve_callable(source, "inputs")(model)
    if isinstance(made, Mapping):
        return (), dict(made)
    return (tuple(made) if isinstance(made, (tuple, list)) else (made,)), {}


def generate_inputs(model: nn.Module) -> dict[str, Any]:
    """Inputs for a Transformers model, by what its ``forward`` takes and its config says.

    Raises:
        ConfigError: Nothing is known about this model.
    """
    config = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    if config is None or not hasattr(model, "main_input_name"):
        raise ConfigError(
            f"inputs for a {type(model).__name__} cannot be generated: give --inputs, a safetensors file of named tensors or "
            "module:function"
        )
    generator = torch.Generator().manual_seed(SEED)
    made: dict[str, Any] = {}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab = getattr(text, "vocab_size", None)
    if "input_ids" in takes and vocab:
        made["input_ids"] = torch.randint(0, vocab, (_BATCH, _TOKENS), generator=generator)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes and vocab:
        made["decoder_input_ids"] = torch.randint(0, vocab, (_BATCH, _TOKENS // 3), generator=generator)
    if "input_features" in takes and hasattr(config, "num_mel_bins"):
        shape = (_BATCH, config.num_mel_bins, 2 * getattr(config, "max_source_positions", 64))
        made["input_features"] = torch.randn(shape, generator=generator)
    if "input_values" in takes and model.main_input_name == "input_values":
        made["input_values"] = torch.randn((_BATCH, 16_000), generator=generator)
    if "pixel_values" in takes:
        made |= _picture(config, made, takes, generator)
    if not made:
        raise ConfigError(f"inputs for a {type(model).__name__} cannot be generated: it takes {', '.join(takes)}; give --inputs")
    dtype, device = getattr(model, "dtype", torch.float32), _device(model)
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in made.items()}


def _picture(config: Any, made: dict[str, Any], takes: Mapping[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    vision = getattr(config, "vision_config", None) or config
    if "image_grid_thw" in takes and getattr(config, "image_token_id", None) is not None:
        return _patches(config, vision, made["input_ids"], takes, generator)
    if not hasattr(vision, "image_size"):
        return {}
    size = vision.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    shape = (_BATCH, getattr(vision, "num_channels", 3), height, width)
    return {"pixel_values": torch.randn(shape, generator=generator)}


def _patches(
    config: Any, vision: Any, ids: torch.Tensor, takes: Mapping[str, Any], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Qwen-VL: an image comes as a row of patches, and its places in the text are marked by a token."""
    merge = getattr(vision, "spatial_merge_size", 1)
    grid = (1, 2 * merge, 2 * merge)
    channels: Any = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    patch = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    count = grid[1] * grid[2]
    places = slice(2, 2 + count // merge**2)
    special = [getattr(config, name, None) for name in ("image_token_id", "video_token_id", "vision_start_token_id")]
    for token in special:
        if token is not None:
            ids[ids == token] = 0
    if special[2] is not None:
        ids[:, 1] = special[2]
    ids[:, places] = config.image_token_id
    found = {
        "pixel_values": torch.randn((ids.shape[0] * count, patch), generator=generator),
        "image_grid_thw": torch.tensor([grid] * ids.shape[0]),
    }
    if "mm_token_type_ids" in takes:
        found["mm_token_type_ids"] = (ids == config.image_token_id).long()
    return found


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def describe_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, OutputFacts]:
    """Run a model and describe every tensor of its answer.

    Args:
        model: Is run without gradients, under a fixed seed.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        ConfigError: The answer holds no tensor.
    """
    torch.manual_seed(SEED)
    with torch.no_grad():
        answer = model(*args, **kwargs)
    found = dict(_tensors(answer, "output", set()))
    if not found:
        raise ConfigError(f"the answer of {type(model).__name__}, a {type(answer).__name__}, holds no tensor to compare")
    return {
        path: OutputFacts(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            nbytes=tensor.numel() * tensor.element_size(),
            finite=bool(torch.isfinite(tensor).all()),
            digest=digest_of_tensor(tensor),
        )
        for path, tensor in found.items()
    }


def _tensors(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))  # all of them are held by the answer, so that an id stays its object's own
    if isinstance(value, Mapping):
        found = [(f"{path}[{key!r}]", value[key]) for key in value]
    elif isinstance(value, (tuple, list)):
        found = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    else:  # a cache of keys and values, a dataclass
        found = [(f"{path}.{name}", item) for name, item in sorted(getattr(value, "__dict__", {}).items())]
    for place, item in found:
        yield from _tensors(item, place, seen)
