"""The manifest: the immutable, typed description of one finished module state, and its validation. Imports no torch.

Tables refer to each other by index. Everything is checked by :func:`validate` against the real sizes of the segments before a
single tensor is made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from torchwcache.encoding import Value, VBool, VFloat, VInt, VObject, VStr, VTensor, VTupleLike, VWeakref
from torchwcache.errors import ManifestError

__all__ = [
    "MANIFEST_VERSION",
    "ClassEdit",
    "Edit",
    "Manifest",
    "ModuleSpec",
    "ObjectSpec",
    "Step",
    "StorageSpec",
    "TensorSpec",
    "decode_manifest",
    "encode_manifest",
    "validate",
]

MANIFEST_VERSION = 2
"""Version of the layout described here; part of every fingerprint."""

StepKind = Literal[
    "attribute", "slot", "index", "key", "cell", "default", "kwdefault", "partial_arg", "partial_keyword", "function", "self",
    "weakref", "hook", "tensor_attribute",
]  # fmt: skip
"""How one object is reached from another.

``attribute``/``slot``: by name; ``index``: in a list, tuple or deque; ``key``: in a mapping; ``cell``, ``default``, ``kwdefault``:
of a function; ``partial_arg``, ``partial_keyword``: of a ``functools.partial``; ``function``, ``self``: of a bound method or
partial; ``weakref``: what a weak reference points to; ``hook``: in a module's hook dict by position; ``tensor_attribute``: in the
``__dict__`` of a tensor.
"""


class _Spec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class StorageSpec(_Spec, frozen=True):
    """One storage: ``nbytes`` bytes at ``offset`` of segment number ``segment``.

    ``shared``: mapped by every client, read-only; otherwise each client gets a private copy of the bytes. ``host``: that copy
    lies in host memory, although the entry lies on a device (a module on a GPU that keeps small tensors on the CPU).
    """

    segment: int
    offset: int
    nbytes: int
    shared: bool
    host: bool = False


class TensorSpec(_Spec, frozen=True):
    """One tensor object.

    ``storage`` is -1 for a tensor without bytes, -2 for one in host memory although the entry lies on a device. ``offset`` and
    ``stride`` count elements. ``cls`` is ``""`` for ``torch.Tensor``, ``"Parameter"`` for ``torch.nn.Parameter``, else
    ``"module:qualname"``. ``flags`` may hold ``conj`` and ``neg``. ``attributes`` are the entries of the tensor's ``__dict__`` that
    are carried by value; those in ``inherited`` are taken over from the tensor that the build put in the same place (bound
    ``weight_loader`` methods and the like).
    """

    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    cls: str
    requires_grad: bool
    flags: tuple[Literal["conj", "neg"], ...]
    attributes: tuple[tuple[str, Value], ...]
    inherited: tuple[str, ...]


class ModuleSpec(_Spec, frozen=True):
    """One module of the tree, in ``named_modules(remove_duplicate=False)`` order.

    ``cls`` is ``"module:qualname"``. ``same_as`` is the index of the first path of a module that appears more than once, else
    -1. ``parameters`` and ``buffers`` list every name in its order, ``None`` where the module holds ``None``; buffers carry
    ``persistent``. ``attributes`` is an index into :attr:`Manifest.attribute_sets`, or -1.
    """

    path: str
    cls: str
    same_as: int
    training: bool
    parameters: tuple[tuple[str, int | None], ...]
    buffers: tuple[tuple[str, int | None, bool], ...]
    attributes: int


class Step(_Spec, frozen=True):
    """One step from an object to what it holds."""

    kind: StepKind
    key: Value


class ObjectSpec(_Spec, frozen=True):
    """An object of the module as built, reached by ``step`` from ``parent``.

    Objects ``0 .. len(modules) - 1`` are the modules themselves; an ``ObjectSpec`` number ``i`` is object ``len(modules) + i``,
    and its parent comes before it. ``type`` (``"module:qualname"``) is checked when it is resolved. ``attributes`` is an index into
    :attr:`Manifest.attribute_sets`, or -1.
    """

    parent: int
    step: Step
    type: str
    attributes: int = -1


class Edit(_Spec, frozen=True):
    """A difference between the module as built on meta and as loaded: set (or delete, when ``value`` is ``None``) one place.

    ``contents`` edits replace everything inside a list, dict, set or deque at once; ``step.key`` is then unused.
    """

    target: int
    step: Step
    value: Value | None
    contents: bool = False


class ClassEdit(_Spec, frozen=True):
    """A class attribute that the load changed, with its value before and after."""

    cls: str
    name: str
    before: Value | None
    after: Value | None


class Manifest(_Spec, frozen=True):
    """One module state. See the field types for what each table holds.

    ``addresses`` says where the producer had each segment mapped, where clients can ask for the same place (memory ``cuda``); it is
    empty where that means nothing. It is a wish, never a promise.
    """

    version: int
    fingerprint: str
    device: str
    memory: str
    construction: Literal["meta", "parameters-meta"]
    segments: tuple[int, ...]
    addresses: tuple[int, ...]
    storages: tuple[StorageSpec, ...]
    tensors: tuple[TensorSpec, ...]
    modules: tuple[ModuleSpec, ...]
    attribute_sets: tuple[tuple[tuple[str, Value], ...], ...]
    objects: tuple[ObjectSpec, ...]
    edits: tuple[Edit, ...]
    class_edits: tuple[ClassEdit, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.segments)


ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "bits8", "qint8", "quint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "qint32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element, by dtype name."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Serialise a manifest to msgpack."""
    return _encoder.encode(manifest)


def decode_manifest(data: bytes | memoryview) -> Manifest:
    """Read a manifest; types are checked, bounds are not (see :func:`validate`).

    Raises:
        ManifestError: Malformed bytes, wrong types, unknown fields, or another manifest version.
    """
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ManifestError(f"malformed manifest: {error}", path="$") from error
    if manifest.version != MANIFEST_VERSION:
        raise ManifestError(f"manifest version {manifest.version}, this is {MANIFEST_VERSION}", path="$.version")
    return manifest


def _fail(path: str, reason: str) -> None:
    raise ManifestError(f"{path}: {reason}", path=path)


def validate(manifest: Manifest, segment_nbytes: Sequence[int]) -> None:
    """Check every index and every offset of a manifest against the segments that really exist.

    Args:
        manifest: As decoded.
        segment_nbytes: Real sizes of the segments' file descriptors, in bytes.

    Raises:
        ManifestError: With the path of the first field that is wrong.
    """
    if tuple(segment_nbytes) != manifest.segments:
        _fail("$.segments", f"declares {list(manifest.segments)} bytes, the file descriptors have {list(segment_nbytes)}")
    if manifest.addresses and len(manifest.addresses) != len(manifest.segments):
        _fail("$.addresses", f"{len(manifest.addresses)} addresses for {len(manifest.segments)} segments")
    for i, address in enumerate(manifest.addresses):
        if not 0 <= address < 1 << 63:
            _fail(f"$.addresses[{i}]", f"{address} is no address")
    _validate_storages(manifest)
    _validate_tensors(manifest)
    _validate_modules(manifest)
    _validate_edits(manifest)


def _validate_storages(manifest: Manifest) -> None:
    segments, count = manifest.segments, len(manifest.segments)
    for i, storage in enumerate(manifest.storages):
        segment, offset, nbytes = storage.segment, storage.offset, storage.nbytes
        if storage.host and storage.shared:
            _fail(f"$.storages[{i}].host", "a storage that is copied into host memory cannot be shared")
        if not 0 <= segment < count:
            _fail(f"$.storages[{i}].segment", f"no segment {segment}")
        if offset < 0 or nbytes <= 0 or offset + nbytes > segments[segment]:
            _fail(f"$.storages[{i}]", f"bytes {offset}..{offset + nbytes} lie outside segment {segment}")


def _validate_tensors(manifest: Manifest) -> None:
    nbytes = [storage.nbytes for storage in manifest.storages]
    count = len(nbytes)
    layouts: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}  # layers repeat: few layouts, many tensors
    for i, tensor in enumerate(manifest.tensors):
        layout = (tensor.dtype, tensor.shape, tensor.stride)
        known = layouts.get(layout)
        if known is None:
            reach = _reach(f"$.tensors[{i}]", *layout)
            known = layouts[layout] = (reach, ITEMSIZE[tensor.dtype])
        reach, itemsize = known
        storage, offset = tensor.storage, tensor.offset
        if 0 <= storage < count:
            if offset < 0 or (offset + reach) * itemsize > nbytes[storage]:
                _fail(
                    f"$.tensors[{i}]",
                    f"elements {offset}..{offset + reach} of {itemsize} bytes lie outside storage {storage} "
                    f"of {nbytes[storage]} bytes",
                )
        elif storage not in (-1, -2):
            _fail(f"$.tensors[{i}].storage", f"no storage {storage}")
        elif reach:
            _fail(f"$.tensors[{i}].storage", f"a tensor of shape {tensor.shape} needs a storage")


def _reach(path: str, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements of its storage a tensor spans, from its first to its last; 0 for one without elements."""
    if dtype not in ITEMSIZE:
        _fail(f"{path}.dtype", f"unknown dtype {dtype!r}")
    if len(shape) != len(stride):
        _fail(f"{path}.stride", f"{len(stride)} strides for {len(shape)} dimensions")
    if any(size < 0 for size in shape) or any(step < 0 for step in stride):
        _fail(path, f"negative size or stride in {shape}, {stride}")
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _validate_modules(manifest: Manifest) -> None:
    count, sets = len(manifest.tensors), len(manifest.attribute_sets)
    if not manifest.modules or manifest.modules[0].path:
        _fail("$.modules", "the first module must be the root, with an empty path")
    for i, module in enumerate(manifest.modules):
        if module.same_as != -1 and not 0 <= module.same_as < i:
            _fail(f"$.modules[{i}].same_as", f"{module.same_as} is not an earlier module")
        if not -1 <= module.attributes < sets:
            _fail(f"$.modules[{i}].attributes", f"no attribute set {module.attributes}")
        for name, tensor in module.parameters:
            if tensor is not None and not 0 <= tensor < count:
                _fail(f"$.modules[{i}]", f"{name}: no tensor {tensor}")
        for name, tensor, _ in module.buffers:
            if tensor is not None and not 0 <= tensor < count:
                _fail(f"$.modules[{i}]", f"{name}: no tensor {tensor}")


_SCALARS = (VBool, VInt, VFloat, VStr)
"""What most edits set: a flag that a loader leaves on every module."""


def _validate_edits(manifest: Manifest) -> None:
    modules, tensors = len(manifest.modules), len(manifest.tensors)
    objects = modules + len(manifest.objects)
    for i, spec in enumerate(manifest.objects):
        if not 0 <= spec.parent < modules + i:
            _fail(f"$.objects[{i}].parent", f"{spec.parent} is not an earlier object")
        if not -1 <= spec.attributes < len(manifest.attribute_sets):
            _fail(f"$.objects[{i}].attributes", f"no attribute set {spec.attributes}")
    for i, edit in enumerate(manifest.edits):
        if not 0 <= edit.target < objects:
            _fail(f"$.edits[{i}].target", f"no object {edit.target}")
        if edit.value is not None and not isinstance(edit.value, _SCALARS):
            _validate_value(f"$.edits[{i}].value", edit.value, tensors, objects)
    for i, tensor in enumerate(manifest.tensors):
        for name, value in tensor.attributes:
            _validate_value(f"$.tensors[{i}].attributes.{name}", value, tensors, objects)


def _validate_value(path: str, value: Value, tensors: int, objects: int) -> None:
    if isinstance(value, VTensor):
        if not 0 <= value.index < tensors:
            _fail(path, f"no tensor {value.index}")
        return
    if isinstance(value, VObject):
        if not 0 <= value.index < objects:
            _fail(path, f"no object {value.index}")
        return
    if isinstance(value, VTupleLike) and not 0 <= value.index < objects:
        _fail(path, f"no object {value.index}")
    if isinstance(value, VWeakref):
        _validate_value(path, value.target, tensors, objects)
    nested = getattr(value, "items", None)
    if isinstance(nested, tuple):
        for item in nested:
            for part in item if isinstance(item, tuple) else (item,):
                _validate_value(path, part, tensors, objects)
    elif isinstance(inner := getattr(value, "value", None), msgspec.Struct):
        _validate_value(path, inner, tensors, objects)  # type: ignore[arg-type]
