"""One type-tagged encoding for fingerprints, captured attributes and the wire.

A :data:`Value` is a tree of tagged msgspec structs: a tuple is not a list, ``1`` is neither ``"1"`` nor ``True``, sets and
integers of any size survive, and a device equal to the entry's own is kept as "the entry's device". Nothing is ever evaluated or
imported to read one. This file imports no torch: dtypes and devices are recognised by their type's name, and turned back into
torch objects by the caller of :func:`decode` (see ``torchwcache.module.values``).
"""

from __future__ import annotations

import enum
import pathlib
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, Union

import msgspec

from torchwcache.errors import EncodingError

__all__ = [
    "Decoder",
    "Encoder",
    "Value",
    "canonical_bytes",
    "decode",
    "encode",
    "from_bytes",
    "to_bytes",
]

_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1
_MAX_DEPTH = 200


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all nodes; ``gc=False`` since a tree of values cannot refer back to itself."""


class VNull(_Node, frozen=True, tag="n"):
    """``None``."""


class VBool(_Node, frozen=True, tag="b"):
    """A ``bool``."""

    value: bool


class VInt(_Node, frozen=True, tag="i"):
    """An ``int`` that fits msgpack (signed or unsigned 64 bit)."""

    value: int


class VBigInt(_Node, frozen=True, tag="I"):
    """An ``int`` of any size, as two's complement big-endian bytes."""

    value: bytes


class VFloat(_Node, frozen=True, tag="f"):
    """A ``float``; NaN and ``-0.0`` survive."""

    value: float


class VComplex(_Node, frozen=True, tag="c"):
    """A ``complex``."""

    real: float
    imag: float


class VStr(_Node, frozen=True, tag="s"):
    """A ``str``."""

    value: str


class VBytes(_Node, frozen=True, tag="y"):
    """A ``bytes``."""

    value: bytes


class VEllipsis(_Node, frozen=True, tag="."):
    """``...``."""


class VList(_Node, frozen=True, tag="l"):
    """A ``list``."""

    items: tuple[Value, ...]


class VTuple(_Node, frozen=True, tag="t"):
    """A ``tuple``."""

    items: tuple[Value, ...]


class VDeque(_Node, frozen=True, tag="q"):
    """A ``collections.deque``."""

    items: tuple[Value, ...]
    maxlen: int | None


class VSet(_Node, frozen=True, tag="S"):
    """A ``set``; items sorted by their encoding."""

    items: tuple[Value, ...]


class VFrozenSet(_Node, frozen=True, tag="F"):
    """A ``frozenset``; items sorted by their encoding."""

    items: tuple[Value, ...]


class VDict(_Node, frozen=True, tag="d"):
    """A ``dict`` (insertion order kept)."""

    items: tuple[tuple[Value, Value], ...]


class VOrderedDict(_Node, frozen=True, tag="o"):
    """A ``collections.OrderedDict``."""

    items: tuple[tuple[Value, Value], ...]


class VEnum(_Node, frozen=True, tag="e"):
    """An enum member, as ``"module:qualname"`` and the member's name."""

    cls: str
    name: str


class VRange(_Node, frozen=True, tag="r"):
    """A ``range``."""

    start: int
    stop: int
    step: int


class VSlice(_Node, frozen=True, tag=":"):
    """A ``slice``."""

    start: Value
    stop: Value
    step: Value


class VPath(_Node, frozen=True, tag="p"):
    """A ``pathlib.Path``."""

    value: str


class VDType(_Node, frozen=True, tag="D"):
    """A ``torch.dtype`` by name, such as ``"bfloat16"``."""

    name: str


class VDevice(_Node, frozen=True, tag="V"):
    """A ``torch.device`` other than the entry's own."""

    name: str


class VEntryDevice(_Node, frozen=True, tag="E"):
    """The device that the entry lives on, whatever its index is in this process."""


class VSize(_Node, frozen=True, tag="z"):
    """A ``torch.Size``."""

    dims: tuple[int, ...]


class VTorchConstant(_Node, frozen=True, tag="L"):
    """A ``torch.layout`` or ``torch.memory_format``, by name."""

    name: str


class VTensor(_Node, frozen=True, tag="T"):
    """Tensor number ``index`` of the manifest."""

    index: int


class VObject(_Node, frozen=True, tag="N"):
    """An object that exists in the module as built: number ``index`` of the manifest's objects."""

    index: int


class VDefine(_Node, frozen=True, tag="="):
    """A new container that is referred to again, by :class:`VReference`: what was shared stays shared."""

    id: int
    value: Value


class VReference(_Node, frozen=True, tag="&"):
    """The container that :class:`VDefine` introduced under ``id``."""

    id: int


class VWeakref(_Node, frozen=True, tag="w"):
    """A weak reference to what ``target`` stands for."""

    target: Value


class VTupleLike(_Node, frozen=True, tag="u"):
    """A tuple of the same class as object ``index`` of the module as built (a named tuple), with new items."""

    index: int
    items: tuple[Value, ...]


Value: TypeAlias = Union[
    VNull, VBool, VInt, VBigInt, VFloat, VComplex, VStr, VBytes, VEllipsis, VList, VTuple, VDeque, VSet, VFrozenSet, VDict,
    VOrderedDict, VEnum, VRange, VSlice, VPath, VDType, VDevice, VEntryDevice, VSize, VTorchConstant, VTensor, VObject, VDefine,
    VReference, VWeakref, VTupleLike,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Value] | None = None

Hook: TypeAlias = Callable[[object, str], "Value | None"]


def _torch_leaf(obj: Any, entry_device: str | None) -> Value | None:
    """Recognise torch's value types without importing torch."""
    kind = type(obj)
    if kind.__module__ != "torch":
        return None
    match kind.__qualname__:
        case "dtype":
            return VDType(str(obj).removeprefix("torch."))
        case "device":
            return VEntryDevice() if str(obj) == entry_device else VDevice(str(obj))
        case "Size":
            return VSize(tuple(int(n) for n in obj))
        case "layout" | "memory_format":
            return VTorchConstant(str(obj).removeprefix("torch."))
    return None


class Encoder:
    """The state of one encoding; subclasses give :meth:`special` a meaning (tensors, shared objects)."""

    def __init__(self, hook: Hook | None = None, entry_device: str | None = None) -> None:
        self.hook = hook
        self.entry_device = entry_device
        self.active: set[int] = set()

    def special(self, obj: Any, path: str) -> Value | None:
        """What comes before everything else; ``None`` to go on as usual."""
        return self.hook(obj, path) if self.hook is not None else None

    def value(self, obj: Any, path: str) -> Value:
        """Encode ``obj``, which was found at ``path``."""
        found = self.special(obj, path)
        if found is not None:
            return found
        leaf = self.leaf(obj, path)
        if leaf is not None:
            return leaf
        if id(obj) in self.active or len(self.active) > _MAX_DEPTH:
            raise EncodingError(
                f"{path}: a container that contains itself, or one nested too deeply, has no canonical form", path=path
            )
        self.active.add(id(obj))
        try:
            return self.container(obj, path)
        finally:
            self.active.discard(id(obj))

    def leaf(self, obj: Any, path: str) -> Value | None:
        """Encode a value that holds no other, or return ``None``."""
        kind = type(obj)
        if obj is None:
            return VNull()
        if obj is Ellipsis:
            return VEllipsis()
        if kind is bool:
            return VBool(obj)
        if kind is int:
            if _INT64_MIN <= obj <= _UINT64_MAX:
                return VInt(obj)
            return VBigInt(obj.to_bytes(obj.bit_length() // 8 + 1, "big", signed=True))
        if kind is float:
            return VFloat(obj)
        if kind is complex:
            return VComplex(obj.real, obj.imag)
        if kind is str:
            return VStr(_utf8(obj, path))
        if kind is bytes:
            return VBytes(obj)
        if isinstance(obj, enum.Enum):
            module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__  # a spawned child's name for the script
            return VEnum(f"{module}:{kind.__qualname__}", obj.name)
        if kind is range:
            return VRange(obj.start, obj.stop, obj.step)
        if isinstance(obj, pathlib.PurePath):
            return VPath(_utf8(str(obj), path))
        return _torch_leaf(obj, self.entry_device)

    def container(self, obj: Any, path: str) -> Value:
        """Encode a container of exactly one of the builtin kinds."""
        kind = type(obj)
        if kind is list:
            return VList(self.items(obj, path))
        if kind is tuple:
            return VTuple(self.items(obj, path))
        if kind is deque:
            return VDeque(self.items(obj, path), obj.maxlen)
        if kind is set or kind is frozenset:
            items = tuple(sorted(self.items(obj, path), key=_encoder.encode))
            return VSet(items) if kind is set else VFrozenSet(items)
        if kind is dict:
            return VDict(self.pairs(obj, path))
        if kind is OrderedDict:
            return VOrderedDict(self.pairs(obj, path))
        if kind is slice:
            return VSlice(self.value(obj.start, path), self.value(obj.stop, path), self.value(obj.step, path))
        raise EncodingError(f"{path}: {kind.__module__}.{kind.__qualname__} has no canonical form", path=path)

    def items(self, obj: Any, path: str) -> tuple[Value, ...]:
        """Encode what a sequence or a set holds."""
        return tuple(self.value(item, f"{path}[{i}]") for i, item in enumerate(obj))

    def pairs(self, obj: Mapping[Any, Any], path: str) -> tuple[tuple[Value, Value], ...]:
        """Encode what a mapping holds, in its order."""
        return tuple((self.value(k, f"{path} key {k!r}"), self.value(v, f"{path}[{k!r}]")) for k, v in obj.items())


def _utf8(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EncodingError(f"{path}: text with lone surrogates has no canonical form", path=path) from error
    return text


def encode(obj: object, *, path: str = "$", hook: Hook | None = None, entry_device: str | None = None) -> Value:
    """Put a Python value into tagged form.

    Args:
        obj: Scalars, strings, bytes, ``None``, enums, paths, torch dtypes, devices and sizes, and tuples, lists, sets, dicts of
            them. Exact types only: a subclass of ``int`` or ``dict`` may mean something else, and is refused.
        path: Where the value was found; used in errors.
        hook: Called first on every object; a returned ``Value`` is taken as it is (tensors, shared objects).
        entry_device: Name of the entry's device (``"cuda:0"``); equal devices become :class:`VEntryDevice`.

    Raises:
        EncodingError: The value, or something in it, has no canonical form; the message says where.
    """
    return Encoder(hook, entry_device).value(obj, path)


def to_bytes(value: Value) -> bytes:
    """Serialise a tree to msgpack."""
    return _encoder.encode(value)


def from_bytes(data: bytes | memoryview) -> Value:
    """Read back what :func:`to_bytes` wrote.

    Raises:
        EncodingError: Malformed bytes, an unknown tag, or nesting that is too deep.
    """
    global _decoder
    if _decoder is None:
        _decoder = msgspec.msgpack.Decoder(Value)
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EncodingError(f"malformed value: {error}", path="$") from error


def _sorted_maps(value: Value) -> Value:
    if isinstance(value, (VDict, VOrderedDict)):
        pairs = [(_sorted_maps(k), _sorted_maps(v)) for k, v in value.items]
        # Two OrderedDicts filled in another order are not equal in Python either: nn.Sequential builds by that order.
        return VDict(tuple(sorted(pairs, key=_encoder.encode))) if isinstance(value, VDict) else VOrderedDict(tuple(pairs))
    if isinstance(value, (VList, VTuple)):
        return type(value)(tuple(_sorted_maps(item) for item in value.items))
    if isinstance(value, VDeque):
        return VDeque(tuple(_sorted_maps(item) for item in value.items), value.maxlen)
    if isinstance(value, VSlice):
        return VSlice(_sorted_maps(value.start), _sorted_maps(value.stop), _sorted_maps(value.step))
    return value


def canonical_bytes(value: Value) -> bytes:
    """Bytes for hashing: like :func:`to_bytes`, but independent of the order in which dicts (not OrderedDicts) were filled."""
    return _encoder.encode(_sorted_maps(value))


def decode(value: Value, *, leaf: Callable[[Value], object] | None = None) -> Any:
    """Turn a tree back into Python objects.

    Args:
        value: What :func:`encode` made.
        leaf: Called for the nodes that this torch-free module cannot make itself: dtypes, devices, sizes, layouts, tensors and
            objects of the manifest.

    Raises:
        EncodingError: A node needs ``leaf`` and none was given, an enum's class is not loaded, or a reference has no target.
    """
    return Decoder(leaf).value(value)


class Decoder:
    """Decodes values one after the other; references reach back to what earlier ones defined."""

    def __init__(self, leaf: Callable[[Value], object] | None) -> None:
        self.leaf = leaf
        self.defined: dict[int, Any] = {}

    def value(self, node: Value, define: int | None = None) -> Any:
        """Decode one value."""
        match node:
            case VNull():
                return None
            case VEllipsis():
                return Ellipsis
            case VBool() | VInt() | VFloat() | VStr() | VBytes():
                return node.value
            case VBigInt():
                return int.from_bytes(node.value, "big", signed=True)
            case VComplex():
                return complex(node.real, node.imag)
            case VEnum():
                return _enum_member(node)
            case VRange():
                return range(node.start, node.stop, node.step)
            case VPath():
                return pathlib.Path(node.value)
            case VSlice():
                return slice(self.value(node.start), self.value(node.stop), self.value(node.step))
            case VDefine():
                return self.value(node.value, node.id)
            case VReference():
                if node.id not in self.defined:
                    raise EncodingError(f"reference {node.id} has no target", path="$")
                return self.defined[node.id]
            case VList() | VTuple() | VDeque() | VSet() | VFrozenSet() | VDict() | VOrderedDict():
                return self._container(node, define)
        if self.leaf is None:
            raise EncodingError(f"{type(node).__name__} cannot be decoded without torch", path="$")
        return self.leaf(node)

    def _container(self, node: VList | VTuple | VDeque | VSet | VFrozenSet | VDict | VOrderedDict, define: int | None) -> Any:
        made: Any
        match node:
            case VTuple():
                made = tuple(self.value(item) for item in node.items)
            case VFrozenSet():
                made = frozenset(self.value(item) for item in node.items)
            case VList():
                made = []
            case VDeque():
                made = deque(maxlen=node.maxlen)
            case VSet():
                made = set()
            case VDict():
                made = {}
            case VOrderedDict():
                made = OrderedDict()
        if define is not None:  # before its items are read: a list may contain itself
            self.defined[define] = made
        match node:
            case VList() | VDeque():
                made.extend(self.value(item) for item in node.items)
            case VSet():
                made.update(self.value(item) for item in node.items)
            case VDict() | VOrderedDict():
                for key, item in node.items:
                    made[self.value(key)] = self.value(item)
        return made


def _enum_member(node: VEnum) -> enum.Enum:
    # Looked up among the modules that are loaded already: reading a manifest must never import anything.
    module, _, qualname = node.cls.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)) or node.name not in found.__members__:
        raise EncodingError(f"enum member {node.cls}.{node.name} does not exist in this process", path="$")
    return found.__members__[node.name]
