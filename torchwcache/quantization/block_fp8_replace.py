"""Quantize the linear layers of a plain module, or, on the meta device, make the module that would come of it.

Which layers are quantized depends on the module alone, never on values: the producer, which quantizes, and a client, which builds
on the meta device, come to the same modules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from torchwcache.module.replace import iter_tensors
from torchwcache.quantization.block_fp8_config import BlockFP8Settings
from torchwcache.quantization.block_fp8_layers import BlockFP8Linear

__all__ = ["HEADS", "is_left_out", "quantize_linears"]

HEADS = ("lm_head", "head", "classifier", "score")
"""Last parts of the names of output layers, which stay as they are unless the user says otherwise."""

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def is_left_out(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module's name is matched, in the way of ``modules_to_not_convert`` in Transformers.

    A pattern matches from the start up to a dot, as a regular expression with the same boundary, or at the end of the name.
    """
    return any(re.match(rf"(?:{p})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(p) for p in patterns)


def quantize_linears(module: nn.Module, settings: BlockFP8Settings) -> nn.Module:
    """Put a :class:`BlockFP8Linear` in the place of every linear layer that can be one.

    These stay as they are: layers of any class but ``nn.Linear`` itself; layers that ``settings.left_out`` matches, or without it
    output layers (:data:`HEADS`, and the module that holds the last parameter); layers whose weight something else holds or views
    (tied embeddings); layers with hooks or a ``forward`` of their own; layers smaller than one block; other dtypes than float32,
    bfloat16 and float16. A module that holds float8 weights was built for a quantized checkpoint, and stays as it is.

    Args:
        module: Filled, or on the meta device; changed in place.
        settings: The block, and what is left out.

    Returns:
        The module; another one only where it is a linear layer itself.
    """
    if any(parameter.dtype.itemsize == 1 and parameter.is_floating_point() for parameter in module.parameters()):
        return module
    made: dict[int, BlockFP8Linear] = {}
    chosen = set(_eligible(module, settings))
    kept: list[nn.Module] = []  # an id is another's once its object is gone
    for path in [path for path, _ in module.named_modules(remove_duplicate=False) if path in chosen]:
        linear = module.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        if id(linear) not in made:
            made[id(linear)] = _quantized(linear, settings)
            linear.weight = nn.Parameter(torch.empty(0, device="meta"))  # the memory goes at once, the object when all is done
            kept.append(linear)
        if path == "":
            return made[id(linear)]
        module.set_submodule(path, made[id(linear)])
    return module


def _eligible(module: nn.Module, settings: BlockFP8Settings) -> list[str]:
    patterns = settings.left_out
    holders = Counter(id(p) for child in module.modules() for p in child._parameters.values() if p is not None)
    storages = Counter(int(tensor.untyped_storage()._cdata) for _, tensor in iter_tensors(module).values())
    parameters = [path for path, _ in module.named_parameters()]
    last = parameters[-1].rpartition(".")[0] if parameters and patterns is None else None
    found: list[str] = []
    for path, child in module.named_modules(remove_duplicate=False):
        if type(child) is not nn.Linear or path == last:
            continue
        if path.rpartition(".")[2] in HEADS if patterns is None else is_left_out(path, patterns):
            continue
        weight = child.weight
        shared = holders[id(weight)] > 1 or storages[int(weight.untyped_storage()._cdata)] > 1
        small = weight.shape[0] < settings.block[0] or weight.shape[1] < settings.block[1]
        own_ways = "forward" in child.__dict__ or any(child.__dict__.get(hooks) for hooks in _HOOKS)
        if not (shared or small or own_ways or weight.dtype not in _DTYPES):
            found.append(path)
    return found


def _quantized(linear: nn.Linear, settings: BlockFP8Settings) -> BlockFP8Linear:
    made = BlockFP8Linear.from_linear(linear, settings.block)
    usual = vars(nn.Linear(1, 1, device="meta"))
    made.__dict__.update({name: value for name, value in vars(linear).items() if name not in usual})
    return made
