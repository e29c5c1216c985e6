"""Which weights vLLM's load never wrote: its own tracking goes by names, and is off for quantized models.

By name a fused projection counts as loaded when one of its shards was, and so do the experts of a layer. Every layer with a
quantization method, which unquantized layers have too, is left out of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from torchwcache.module import unwritten
from torchwcache.module.unwritten import Watch

__all__ = ["not_given_by_target", "watched"]

_UNSET = {"weight_scale_inv": torch.finfo(torch.float32).min}
"""What vLLM puts into the scales of block FP8 before they are loaded (``quantization/utils/fp8_utils.py``)."""

_SHARING = ("eagle", "eagle3", "mtp")
_EMBEDDING = re.compile(r"model\.embed_tokens\.")
_HEAD = re.compile(r"lm_head\.|model\.layers\.[^.]+\.shared_head\.head\.")


def watched(base_loader: Any) -> AbstractContextManager[Watch]:
    """Watch the one load that is done inside, in this thread.

    Args:
        base_loader: vLLM's module ``model_loader.base_loader``, in whose name ``initialize_model`` builds the model. Its weights
            are written by the model's ``load_weights``; what is done with them afterwards is not the loader's.
    """
    return unwritten.watched(base_loader, "initialize_model", unset=_UNSET, parts=_unpadded)


def _unpadded(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """What a checkpoint fills of experts that some of vLLM's kernels want larger (since 0.32; ``RoutedExperts``).

    Neither vLLM's loader nor all of its kernels give the rest a value.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for path, layer in model.named_modules():
        config, up, down = (getattr(layer, name, None) for name in ("moe_config", "w13_weight", "w2_weight"))
        hidden = getattr(config, "hidden_dim_unpadded", None)
        size = getattr(config, "intermediate_size_per_partition_unpadded", None)
        if not isinstance(up, torch.Tensor) or not isinstance(down, torch.Tensor) or not hidden or not size:
            continue
        gated, padded = bool(getattr(config, "is_act_and_mul", True)), down.shape[-1]
        if up.dim() == 3 and up.shape[1:] == (padded * (2 if gated else 1), down.shape[1]):
            starts = (0, padded) if gated else (0,)
            found[f"{path}.w13_weight"] = [up.detach()[:, start : start + size, :hidden] for start in starts]
            found[f"{path}.w2_weight"] = [down.detach()[:, :hidden, :size]]
    return found


def not_given_by_target(names: Sequence[str], model: nn.Module, vllm_config: Any) -> tuple[str, ...]:
    """What is left of a draft model's weights when those go in whose place vLLM puts the target's, once both are loaded.

    As ``SpecDecodeBaseProposer._maybe_share_embeddings`` and ``_maybe_share_lm_head`` decide (and, for vLLM's second model runner,
    ``spec_decode/eagle/utils.py``). A weight that has another place in the model, too, is used from there, and stays.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in _SHARING:
        return tuple(names)
    given: list[re.Pattern[str]] = []
    if vllm_config.parallel_config.pipeline_parallel_size == 1 and _takes_embedding(model, speculative):
        given.append(_EMBEDDING)
    if not getattr(model, "has_own_lm_head", False) and not (speculative.use_gemma4_mtp() or speculative.use_step3p5_mtp()):
        given.append(_HEAD)
    places: dict[int, list[str]] = {}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for place, tensor in tensors.items():
        places.setdefault(id(tensor), []).append(place)

    def is_given(name: str) -> bool:
        others = places.get(id(tensors.get(name)), [name])
        return all(any(pattern.match(place) for pattern in given) for place in others)

    return tuple(name for name in names if not is_given(name))


def _takes_embedding(model: nn.Module, speculative: Any) -> bool:
    own = getattr(model, "has_own_embed_tokens", None)
    if own is None:
        return True  # a draft of the target's own layers: multi-token prediction
    weight = getattr(getattr(getattr(model, "model", None), "embed_tokens", None), "weight", None)
    width = int(speculative.target_model_config.get_hidden_size())
    return not own and isinstance(weight, torch.Tensor) and weight.shape[-1] == width
