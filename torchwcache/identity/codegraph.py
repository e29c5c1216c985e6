"""Walk everything that a piece of code refers to, and write down one record for each thing. Imports no torch."""

from __future__ import annotations

import copyreg
import ctypes
import enum
import functools
import logging
import pickle
import re
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

from torchwcache.encoding import canonical_bytes, encode
from torchwcache.errors import EncodingError, FingerprintError
from torchwcache.identity.bytecode import code_record, global_names
from torchwcache.identity.origin import PYTHON, origin_of, origin_of_object

__all__ = ["Graph"]

_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
            types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)  # fmt: skip
# Locks and loggers decide nothing about weights, and every second helper names one.
_NEUTRAL = (logging.Logger, logging.LoggerAdapter)
_NEUTRAL_TYPES = frozenset({("_thread", "lock"), ("_thread", "RLock"), ("_thread", "_local"), ("_weakref", "ReferenceType")})
# Written by Python or by ABCMeta and the like, not by whoever wrote the class; or only for readers.
_NO_MEMBERS = frozenset({
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__firstlineno__",
    "__static_attributes__",
    "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__", "__annotate__", "__annotations_cache__",
    "__annotate_func__", "__dataclass_params__", "__dataclass_fields__", "__match_args__",
    "__slotnames__",
})  # fmt: skip
_OURS = ("torchwcache", "torchwcache_nn")
_MAX_DEPTH = 60
_MAX_ITEMS = 4096
_MAX_ELEMENTS = 1 << 20
_COUNTED = frozenset({list, tuple, dict, set, frozenset, deque, OrderedDict, str, bytes, bytearray})


class Graph:
    """The things that a start refers to, numbered in the order in which they were found.

    Args:
        soft: Leave out what has no canonical form, instead of raising. Classes are always walked softly: their methods name
            much that has nothing to do with weights.
    """

    def __init__(self, *, soft: bool) -> None:
        self.soft = soft
        self.labels: list[str] = []
        self.records: list[object] = []
        self._numbers: dict[tuple[int, bool], int] = {}
        self._things: list[tuple[Any, str, bool]] = []  # also keeps them alive, so that an id means one thing
        self._active: list[int] = []

    def run(self) -> None:
        """Write records until nothing new is found."""
        while len(self.records) < len(self._things):
            thing, path, soft = self._things[len(self.records)]
            outer, self.soft = self.soft, soft
            try:
                self.records.append(self._record(thing, path))
            finally:
                self.soft = outer

    def classes(self) -> list[int]:
        """Numbers of the records that are classes."""
        return [i for i, (thing, _, _) in enumerate(self._things) if isinstance(thing, type)]

    def readable(self, number: int) -> object:
        """A record with names in place of numbers: it does not change when something else is added to the graph."""

        def named(item: object) -> object:
            if not isinstance(item, list | tuple):
                return item
            if len(item) == 2 and item[0] == "ref" and isinstance(item[1], int):
                return ("ref", self.labels[item[1]])
            return tuple(named(part) for part in item)

        return named(self.records[number])

    # ---- values ----------------------------------------------------------------------------------------------------------------

    def value(self, obj: Any, path: str) -> object:
        """The canonical form of a value: plain data, with ``("ref", number)`` for what gets a record of its own.

        Raises:
            FingerprintError: It has none, and this walk is not soft.
        """
        if id(obj) in self._active or len(self._active) > _MAX_DEPTH:
            return self._opaque(obj, path, "contains itself, or is nested too deeply")
        self._active.append(id(obj))
        try:
            return self._value(obj, path)
        finally:
            self._active.pop()

    def _value(self, obj: Any, path: str) -> object:
        if isinstance(obj, enum.Enum):
            return ("enum", f"{type(obj).__module__}:{type(obj).__qualname__}", obj.name, self.value(obj.value, path))
        found = self._container(obj, path)
        if found is not None:
            return found
        try:
            encode(obj)
        except EncodingError:
            pass
        else:
            return obj
        for handler in (self._code_value, self._wrapper, self._data):
            found = handler(obj, path)
            if found is not None:
                return found
        return self._instance(obj, path)

    def _container(self, obj: Any, path: str) -> object | None:
        kind = type(obj)
        if kind in (list, tuple, deque):
            return (kind.__name__, *(self.value(item, f"{path}[{i}]") for i, item in enumerate(obj)))
        if kind in (set, frozenset):
            # The order of iteration depends on PYTHONHASHSEED and on addresses; numbers of references must not.
            items = [self.value(item, f"{path}{{}}") for item in sorted(obj, key=_qualified)]
            return (kind.__name__, *sorted(items, key=_bytes))
        if kind in (dict, OrderedDict, types.MappingProxyType):
            pairs = [(self.value(key, f"{path} key"), self.value(item, f"{path}[{key!r:.60}]")) for key, item in obj.items()]
            return (kind.__name__, *(pairs if kind is OrderedDict else sorted(pairs, key=_bytes)))
        return None

    def _code_value(self, obj: Any, path: str) -> object | None:
        if isinstance(obj, type):
            return _named(obj) or self._ref(obj, path, soft=True)
        if isinstance(obj, types.FunctionType):
            return self._function_value(obj, path)
        if isinstance(obj, types.ModuleType):
            origin = origin_of(obj.__name__)
            return (*origin, obj.__name__) if origin is not None else self._ref(obj, path, soft=True)
        if isinstance(obj, types.MethodType):
            return ("method", self.value(obj.__func__, path), self.value(obj.__self__, f"{path}.__self__"))
        if isinstance(obj, _BUILTIN):
            owner = getattr(obj, "__self__", None) or getattr(obj, "__objclass__", None)
            if owner is None or isinstance(owner, types.ModuleType | type):
                where = f"{getattr(owner, '__module__', None) or getattr(owner, '__name__', obj.__module__)}"
                return ("builtin", PYTHON, where, obj.__qualname__)
            return ("builtin", obj.__qualname__, self.value(owner, f"{path}.__self__"))
        if isinstance(obj, types.CodeType):
            return code_record(obj, lambda constant: self.value(constant, path))
        return None

    def _function_value(self, obj: types.FunctionType, path: str) -> object:
        named = _named(obj)
        if named is None:
            return self._ref(obj, path)
        if _lookup(obj.__module__, obj.__qualname__) is obj:
            return named
        # A function made by a library's function: its code is versioned, what it closed over is not.
        return ("made", named, self._captured(obj, path))

    def _wrapper(self, obj: Any, path: str) -> object | None:
        if isinstance(obj, functools.partial):
            arguments = self.value(obj.args, f"{path} partial arguments"), self.value(obj.keywords, f"{path} partial keywords")
            return ("partial", self.value(obj.func, path), *arguments)
        if isinstance(obj, functools.partialmethod):
            return ("partialmethod", self.value(obj.func, path), self.value(obj.args, path), self.value(obj.keywords, path))
        if isinstance(obj, staticmethod | classmethod):
            return (type(obj).__name__, self.value(obj.__func__, path))
        if isinstance(obj, property):
            return ("property", *(self.value(part, path) for part in (obj.fget, obj.fset, obj.fdel)))
        if isinstance(obj, functools.cached_property):
            return ("cached_property", self.value(obj.func, path))
        if isinstance(obj, types.CellType):
            try:
                return ("cell", self.value(obj.cell_contents, path))
            except ValueError:
                return ("cell",)
        wrapped = getattr(obj, "__wrapped__", None) if type(obj).__module__ == "functools" else None
        return ("wrapped", type(obj).__qualname__, self.value(wrapped, path)) if wrapped is not None else None

    def _data(self, obj: Any, path: str) -> object | None:
        kind = type(obj)
        if isinstance(obj, re.Pattern):
            return ("pattern", self.value(obj.pattern, path), obj.flags)
        if isinstance(obj, _NEUTRAL) or (kind.__module__, kind.__qualname__) in _NEUTRAL_TYPES:
            return ("neutral", kind.__qualname__)
        if kind.__module__ in ("typing", "typing_extensions") or isinstance(obj, types.GenericAlias | types.UnionType):
            return ("typing", repr(obj))
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(obj, torch.Tensor):
                return self._tensor(obj, path)
            if isinstance(obj, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
                return ("operator", str(obj))
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(obj, numpy.ndarray | numpy.generic) and not obj.dtype.hasobject:
            return ("ndarray", str(obj.dtype), tuple(obj.shape), _hash(numpy.ascontiguousarray(obj).tobytes()))
        return None

    def _tensor(self, tensor: Any, path: str) -> object:
        torch = sys.modules["torch"]
        shape, dtype = tuple(int(size) for size in tensor.shape), str(tensor.dtype)
        if tensor.is_meta:
            return ("tensor", dtype, shape, "meta")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return self._opaque(tensor, path, "is not a dense tensor")
        raw = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        return ("tensor", dtype, shape, _hash(ctypes.string_at(raw.data_ptr(), raw.numel()) if raw.numel() else b""))

    def _instance(self, obj: Any, path: str) -> object:
        """Any other object, by its class and its state, as pickle would see it. Nothing is evaluated."""
        kind = type(obj)
        if self.soft and not isinstance(obj, tuple | list | dict | str | int | float):
            # Of a library's registries, caches and handles it can be said that their class is the same. An object of the user's
            # own may hold the very setting that an __init__ reads.
            named = _named(kind)
            if named is None and kind.__module__.partition(".")[0] in _OURS:
                # Attachments and the like come and go. (An editable install of this package would make them the user's own.)
                named = ("torchwcache", f"{kind.__module__}:{kind.__qualname__}")
            return ("instance", named) if named is not None else self._ref(obj, path, soft=True)
        if kind.__module__ == "builtins":  # generators, memory views: their state is out of reach
            return self._opaque(obj, path, "has no canonical form")
        return self._ref(obj, path)

    def _opaque(self, obj: Any, path: str, reason: str) -> object:
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        if self.soft:
            return ("opaque", kind)
        raise FingerprintError(
            f"{path}: {kind} {reason}, so it is not known what this code does. Pass the value through build_kwargs in plain "
            "form, or vouch for the code with ModelConfig(code_version=...)",
            path=path,
            kind=kind,
        )

    def _ref(self, obj: Any, path: str, *, soft: bool = False) -> object:
        soft = soft or self.soft
        number = self._numbers.get((id(obj), soft))
        if number is None:
            number = self._numbers[id(obj), soft] = len(self._things)
            self._things.append((obj, path, soft))
            module = obj.__name__ if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", type(obj).__module__)
            module = "__main__" if module == "__mp_main__" else module  # a spawned child's name for the same script
            self.labels.append(f"{module}:{getattr(obj, '__qualname__', type(obj).__qualname__)}")
        return ("ref", number)

    # ---- records ---------------------------------------------------------------------------------------------------------------

    def _record(self, thing: Any, path: str) -> object:
        if isinstance(thing, type):
            return self._class_record(thing, path)
        if isinstance(thing, types.FunctionType):
            return self._function_record(thing, path)
        if isinstance(thing, types.ModuleType):
            return self._module_record(thing, path)
        return self._plain_state_record(thing, path) if self.soft else self._instance_record(thing, path)

    def _captured(self, function: types.FunctionType, path: str) -> object:
        names = function.__code__.co_freevars
        cells = dict(zip(names, function.__closure__ or (), strict=True))
        return (
            self.value(function.__defaults__, f"{path} defaults"),
            self.value(function.__kwdefaults__, f"{path} keyword defaults"),
            tuple((name, self.value(cell, f"{path} closure {name!r}")) for name, cell in cells.items()),
        )

    def _function_record(self, function: types.FunctionType, path: str) -> object:
        code = code_record(function.__code__, lambda constant: self.value(constant, f"{path} constants"))
        return ("function", code, self._captured(function, path), self._globals(function, path))

    def _globals(self, function: types.FunctionType, path: str) -> object:
        where = function.__globals__
        return tuple(
            (name, self.value(where[name], f"{path} global {name!r}"))
            for name in global_names(function.__code__)
            if name in where and name != "__builtins__"
        )

    def _class_record(self, cls: type, path: str) -> object:
        members = sorted((name, item) for name, item in vars(cls).items() if name not in _NO_MEMBERS)
        return (
            "class",
            f"{'__main__' if cls.__module__ == '__mp_main__' else cls.__module__}:{cls.__qualname__}",
            tuple(self.value(base, f"{path} base") for base in cls.__bases__),
            self.value(type(cls), f"{path} metaclass"),
            tuple((name, self.value(item, f"{path}.{name}")) for name, item in members),
        )

    def _module_record(self, module: types.ModuleType, path: str) -> object:
        """A user's module that is named as a whole: its source, and the code in it that is loaded.

        Both, since the file may have been edited after it was imported: neither may then pass for the other.
        """
        own = [
            (name, self.value(item, f"{path}.{name}"))
            for name, item in sorted(vars(module).items())
            if isinstance(item, types.FunctionType | type | types.ModuleType) and not name.startswith("__")
        ]
        return ("module", module.__name__, _source_digest(module), tuple(own))

    def _plain_state_record(self, obj: Any, path: str) -> object:
        """Class and plain attributes of a user's object: its settings.

        Whatever else it holds (handles, live models, other objects) comes and goes while a program runs: named by its kind only.
        """
        state = getattr(obj, "__dict__", None)
        items = sorted(state.items(), key=lambda item: str(item[0])) if isinstance(state, dict) else []
        known = tuple((name, self._setting(value, f"{path}.{name}")) for name, value in items)
        return ("instance", self._ref(type(obj), path, soft=True), known)

    def _setting(self, value: Any, path: str) -> object:
        large = _size(value)
        if large is not None:
            return large
        torch = sys.modules.get("torch")
        if isinstance(value, type) or (torch is not None and isinstance(value, torch.Tensor)):
            return self.value(value, path)
        try:
            encode(value)
        except EncodingError:
            return ("kind", f"{type(value).__module__}:{type(value).__qualname__}")
        return self.value(value, path)

    def _instance_record(self, obj: Any, path: str) -> object:
        try:
            reduced = obj.__reduce_ex__(4)
        except (TypeError, AttributeError, NotImplementedError, pickle.PicklingError):
            return self._opaque(obj, path, "cannot be taken apart")
        if isinstance(reduced, str):
            return ("named", type(obj).__module__, reduced)
        make, arguments, state, items, pairs = (*reduced, *[None] * 5)[:5]
        if make is copyreg.__newobj__ and arguments:  # type: ignore[attr-defined]
            made: object = ("new", self.value(type(obj), path), self.value(tuple(arguments[1:]), path))
        else:
            made = ("made", self.value(make, path), self.value(tuple(arguments), path))
        listed = tuple(self.value(item, f"{path}[{i}]") for i, item in enumerate(items or ()))
        keyed = sorted(((self.value(k, path), self.value(v, f"{path}[{k!r:.60}]")) for k, v in pairs or ()), key=_bytes)
        return ("instance", made, self._state(state, path), listed, tuple(keyed))

    def _state(self, state: Any, path: str) -> object:
        if isinstance(state, Mapping):
            return tuple((name, self.value(state[name], f"{path}.{name}")) for name in sorted(state, key=str))
        return self.value(state, path)


def _named(obj: Any) -> object | None:
    """A reference to a class or function by the version of where it comes from, or ``None`` for the user's own."""
    origin = origin_of_object(obj)
    return (*origin, f"{obj.__module__}:{obj.__qualname__}") if origin is not None else None


def _lookup(module: str, qualname: str) -> object:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _size(obj: Any) -> object | None:
    """Kind and size of what is too large to be written down beside a class, else ``None``."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.nn.Module):
        return ("module", type(obj).__qualname__)
    if torch is not None and isinstance(obj, torch.Tensor):
        return ("large", "tensor", tuple(obj.shape), str(obj.dtype)) if obj.numel() > _MAX_ELEMENTS else None
    if isinstance(obj, Sized) and not isinstance(obj, type) and type(obj) in _COUNTED and len(obj) > _MAX_ITEMS:
        return ("large", type(obj).__qualname__, len(obj))
    return None


def _qualified(obj: Any) -> str:
    return f"{getattr(obj, '__module__', '')}:{getattr(obj, '__qualname__', '')}"


def _bytes(value: object) -> bytes:
    return canonical_bytes(encode(value))


def _hash(data: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def _source_digest(module: types.ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    try:
        return _hash(Path(file).read_bytes()) if isinstance(file, str) else None
    except OSError:
        return None
