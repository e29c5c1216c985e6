"""Transformers' record of the weight conversions that a load used, which ``save_pretrained`` reverts.

The record is a list of objects that the build does not make and a manifest cannot carry. Each is one of the conversions that
Transformers has registered for the model; so their numbers are carried, and the objects are made anew when somebody asks for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, overload

from torch import nn

__all__ = ["NUMBERS", "OBJECTS", "restore_conversions", "stamp_conversions"]

OBJECTS = "_weight_conversions"
NUMBERS = "_torchwcache_weight_conversions"


def _registered(module: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(module, kwargs.get("key_mapping"), getattr(module, "hf_quantizer", None)))


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


class Conversions(Sequence[Any]):
    """The record, made when somebody looks at it: few clients ever save, and Transformers compiles patterns for 60 ms."""

    def __init__(self, module: nn.Module, kwargs: Mapping[str, Any], numbers: tuple[int, ...]) -> None:
        self._module = weakref.ref(module)  # the module holds this object
        self._kwargs, self._numbers = kwargs, numbers
        self._made: list[Any] | None = None

    def _all(self) -> list[Any]:
        if self._made is None:
            registered = _registered(self._module(), self._kwargs)
            self._made = [registered[number] for number in self._numbers]
            for conversion in self._made:
                conversion._was_used = True
        return self._made

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._all()[index]


def restore_conversions(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """After a rebind: put the record back. A module that was loaded here keeps its own."""
    numbers = module.__dict__.get(NUMBERS)
    if numbers is not None and OBJECTS not in module.__dict__:
        module.__dict__[OBJECTS] = Conversions(module, kwargs, numbers)
