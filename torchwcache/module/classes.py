"""Class attributes of the classes in a module tree: a load that changes one changes the module (design D5)."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from torchwcache.encoding import Encoder, Value
from torchwcache.errors import EncodingError
from torchwcache.manifest import ClassEdit
from torchwcache.module.graph import type_name

__all__ = ["ClassSnapshot", "class_attributes", "encode_class_value", "tree_classes"]

_CODE = (types.FunctionType, staticmethod, classmethod, property, type, types.GetSetDescriptorType, types.MemberDescriptorType)
_encoder = Encoder()
_MAX_DEPTH = 4


def tree_classes(module: nn.Module) -> dict[str, type]:
    """Every class in the tree and its bases, but for those that ``nn.Module`` itself builds on, by name."""
    common = set(nn.Module.__mro__)
    found = {cls for item in module.modules() for cls in type(item).__mro__ if cls not in common}
    return {type_name(cls): cls for cls in found}


def encode_class_value(value: Any) -> Value | None:
    """A class attribute in tagged form, or ``None`` when it has none."""
    try:
        return _encoder.value(value, "$")
    except EncodingError:
        return None


def class_attributes(cls: type) -> dict[str, Any]:
    """What a class itself holds that is neither code nor of Python's own making."""
    return {
        name: value
        for name, value in cls.__dict__.items()
        if not isinstance(value, _CODE) and not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl"
    }


def _marks(value: Any, depth: int = 0) -> object:
    """What tells that a class attribute without a tagged form was changed in place: a tensor, or one in a container."""
    if isinstance(value, torch.Tensor):
        return (id(value), 0 if value.is_inference() else value._version)
    if depth < _MAX_DEPTH:
        if isinstance(value, dict):
            return [(id(key), _marks(item, depth + 1)) for key, item in value.items()]
        if isinstance(value, (list, tuple)):
            return [_marks(item, depth + 1) for item in value]
    return None


class ClassSnapshot:
    """The class attributes of a tree at one moment; taken before a load, compared after it."""

    def __init__(self, module: nn.Module) -> None:
        self._classes = tree_classes(module)
        # Values are kept both encoded (a list that is changed in place is the same object) and as objects (for what is opaque).
        self._before = {
            name: {
                attribute: (value, encode_class_value(value), _marks(value)) for attribute, value in class_attributes(cls).items()
            }
            for name, cls in self._classes.items()
        }

    def changes(self) -> tuple[list[ClassEdit], list[tuple[str, str]]]:
        """What changed since: edits that a client can repeat, and ``(path, reason)`` for what it cannot."""
        edits: list[ClassEdit] = []
        problems: list[tuple[str, str]] = []
        for name, cls in self._classes.items():
            before, now = self._before[name], class_attributes(cls)
            for attribute in before.keys() | now.keys():
                old_object, old, marks = before.get(attribute, (None, None, None))
                new_object = now.get(attribute)
                new = encode_class_value(new_object) if attribute in now else None
                if old == new and (old is not None or (old_object is new_object and marks == _marks(new_object))):
                    continue
                if (attribute in before and old is None) or (attribute in now and new is None):
                    problems.append((f"class {name}.{attribute}", "the load changed this class attribute to something opaque"))
                else:
                    edits.append(ClassEdit(name, attribute, old, new))
        return sorted(edits, key=lambda edit: (edit.cls, edit.name)), problems
