"""Transformers' record of the weight conversions that a load used, which ``save_pretrained`` reverts.

The record is a list of objects that the build does not make and a manifest cannot carry. Each is one of the conversions that
Transformers has registered for the model; so their numbers are carried, and the objects are made anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["NUMBERS", "OBJECTS", "restore_conversions", "stamp_conversions"]

OBJECTS = "_weight_conversions"
NUMBERS = "_torchwcache_weight_conversions"


def _registered(module: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(module, kwargs.get("key_mapping"), None))


def _identity(conversion: Any) -> tuple[Any, ...]:
    return (
        type(conversion),
        tuple(conversion._original_source_patterns),
        tuple(conversion._original_target_patterns),
        conversion.scope_prefix,
        conversion.base_model_prefix,
    )


def stamp_conversions(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """After a load: note the numbers of the conversions that it used, where all of them are registered ones."""
    used = module.__dict__.get(OBJECTS)
    if not isinstance(used, list):
        return
    try:
        known = [_identity(conversion) for conversion in _registered(module, kwargs)]
        module.__dict__[NUMBERS] = tuple(known.index(_identity(conversion)) for conversion in used)
    except (ImportError, AttributeError, TypeError, ValueError):
        return  # another Transformers, or conversions of the user's own: the capture will refuse what it cannot carry


def restore_conversions(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """After a rebind: make the record anew. A module that was loaded here keeps its own."""
    numbers = module.__dict__.get(NUMBERS)
    if numbers is None or OBJECTS in module.__dict__:
        return
    registered = _registered(module, kwargs)
    used = [registered[number] for number in numbers]
    for conversion in used:
        conversion._was_used = True
    module.__dict__[OBJECTS] = used
