"""Is a manifest what it says? Every number in it is checked before anything is made from it.

Whole columns are checked in one step each. Only when one is wrong is it looked through for the place to name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, islice
from operator import add, ge, gt, le
from typing import TYPE_CHECKING, NoReturn

import msgspec

from torchwcache.encoding import Value, VBool, VFloat, VInt, VObject, VStr, VTensor, VTupleLike
from torchwcache.errors import ManifestError

if TYPE_CHECKING:
    from torchwcache.manifest import Manifest
    from torchwcache.manifest.columns import Column
    from torchwcache.manifest.tables import ModuleKind, Modules, Storages, TensorKind, Tensors

__all__ = ["ITEMSIZE", "validate"]

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

_MOST = (1 << 63) - 1
"""The largest number that torch takes."""
_SCALARS = (VBool, VInt, VFloat, VStr)
"""What most edits set: a flag that a loader leaves on every module."""


def _fail(path: str, reason: str) -> NoReturn:
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
            _fail(f"$.addresses[{i}]", f"no address {address}")
    _check_storages(manifest.storages, manifest.segments)
    _check_tensors(manifest.tensors, manifest.storages)
    _check_modules(manifest.modules, len(manifest.tensors))
    _check_values(manifest)


def _check_range(path: str, column: Column, low: int, end: int, what: str) -> None:
    """Each value of a column must be the number of something: in ``[low, end)``."""
    for part in column.parts():
        if min(part) < low or max(part) >= end:
            i = next(i for i, value in enumerate(column) if not low <= value < end)
            _fail(f"{path}[{i}]", f"no {what} {column[i]}")


def _check_length(path: str, column: Sequence[object], count: int) -> None:
    if len(column) != count:
        _fail(path, f"{len(column)} values for {count} rows")


# ---- storages and tensors ----------------------------------------------------------------------------------------------------


def _check_storages(storages: Storages, segments: tuple[int, ...]) -> None:
    segment, offset, nbytes, count = storages.segment, storages.offset, storages.nbytes, len(storages.segment)
    _check_length("$.storages.offset", offset, count)
    _check_length("$.storages.nbytes", nbytes, count)
    _check_range("$.storages.segment", segment, 0, len(segments), "segment")
    _check_range("$.storages.private", storages.private, 0, count, "storage")
    for i, number in enumerate(storages.host if not set(storages.host) <= set(storages.private) else ()):
        if number not in storages.private:
            _fail(f"$.storages.host[{i}]", f"storage {number} is not private: what is copied into host memory cannot be shared")
    for numbers, starts, sizes in zip(segment.parts(), offset.parts(), nbytes.parts(), strict=True):
        fits = all(map(le, map(add, starts, sizes), map(segments.__getitem__, numbers)))
        if min(starts) >= 0 and min(sizes) > 0 and fits:
            continue
        for i, (number, start, size) in enumerate(zip(segment, offset, nbytes, strict=True)):
            if start < 0 or size <= 0 or start + size > segments[number]:
                _fail(f"$.storages.offset[{i}]", f"bytes {start}..{start + size} lie outside segment {number}")


def _check_tensors(tensors: Tensors, storages: Storages) -> None:
    count = len(tensors.kind)
    _check_length("$.tensors.storage", tensors.storage, count)
    _check_range("$.tensors.kind", tensors.kind, 0, len(tensors.kinds), "kind of tensor")
    _check_range("$.tensors.storage", tensors.storage, -2, len(storages), "storage")
    needed = [_nbytes(f"$.tensors.kinds[{i}]", kind) for i, kind in enumerate(tensors.kinds)]
    nbytes = storages.nbytes.view

    def there(storage: int) -> int:
        return nbytes[storage] if storage >= 0 else 0  # the numbers -1 and -2 stand for no storage

    for places, numbers in zip(tensors.storage.parts(), tensors.kind.parts(), strict=True):
        found = map(nbytes.__getitem__, places) if min(places) >= 0 else map(there, places)
        if all(map(ge, found, map(needed.__getitem__, numbers))):
            continue
        for i, (kind, storage) in enumerate(zip(tensors.kind, tensors.storage, strict=True)):
            if needed[kind] > there(storage):
                where = f"storage {storage} of {there(storage)} bytes" if storage >= 0 else "no storage"
                _fail(f"$.tensors.storage[{i}]", f"{needed[kind]} bytes of a tensor do not fit into {where}")
    for i, (number, offset) in enumerate(tensors.offsets):
        if not 0 <= number < count:
            _fail(f"$.tensors.offsets[{i}]", f"no tensor {number}")
        kind, storage = tensors.kind[number], tensors.storage[number]
        start = offset * ITEMSIZE[tensors.kinds[kind].dtype]
        if offset < 0 or (storage >= 0 and start + needed[kind] > there(storage)):
            _fail(f"$.tensors.offsets[{i}]", f"bytes {start}..{start + needed[kind]} lie outside storage {storage}")


def _nbytes(path: str, kind: TensorKind) -> int:
    """How many bytes of its storage a tensor spans, from its first element to its last; 0 for one without elements."""
    shape, stride = kind.shape, kind.stride
    if kind.dtype not in ITEMSIZE:
        _fail(f"{path}.dtype", f"unknown dtype {kind.dtype!r}")
    if len(shape) != len(stride):
        _fail(f"{path}.stride", f"{len(stride)} strides for {len(shape)} dimensions")
    if any(size < 0 for size in shape) or any(step < 0 for step in stride):
        _fail(path, f"negative size or stride in {shape}, {stride}")
    elements = math.prod(size for size in shape if size)
    if max((elements, *stride, *shape)) > _MOST:
        _fail(path, f"no tensor can have shape {shape} and strides {stride}")
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * ITEMSIZE[kind.dtype]


# ---- modules -----------------------------------------------------------------------------------------------------------------


def _check_modules(modules: Modules, tensors: int) -> None:
    if not modules.kind:
        _fail("$.modules.kind", "the first module must be the root")
    _check_range("$.modules.kind", modules.kind, 0, len(modules.kinds), "kind of module")
    members = Counter(modules.kind)
    for i, kind in enumerate(modules.kinds):
        _check_module_kind(f"$.modules.kinds[{i}]", kind, members[i], tensors)
        if kind.same_as:
            own = [number for number, other in enumerate(modules.kind) if other == i]
            for row, (number, first) in enumerate(zip(own, kind.same_as, strict=True)):
                if not 0 <= first < number:
                    _fail(f"$.modules.kinds[{i}].same_as[{row}]", f"{first} is not an earlier module")
    _check_tree(modules)


def _check_module_kind(path: str, kind: ModuleKind, count: int, tensors: int) -> None:
    for i, (_, column) in enumerate(kind.parameters):
        _check_length(f"{path}.parameters[{i}]", column, count)
        _check_range(f"{path}.parameters[{i}]", column, -1, tensors, "tensor")
    for i, (_, _, column) in enumerate(kind.buffers):
        _check_length(f"{path}.buffers[{i}]", column, count)
        _check_range(f"{path}.buffers[{i}]", column, -1, tensors, "tensor")
    for i, (_, values, column) in enumerate(kind.attributes):
        if column or len(values) != 1:
            _check_length(f"{path}.attributes[{i}]", column, count)
            _check_range(f"{path}.attributes[{i}]", column, 0, len(values), "value")
    if kind.same_as:
        _check_length(f"{path}.same_as", kind.same_as, count)
        if kind.parameters or kind.buffers or kind.attributes:
            _fail(path, "what a module holds is given at its first path only")


def _check_tree(modules: Modules) -> None:
    """Each module but the root must lie inside one that comes before it, and none may be missing."""
    count = len(modules.kind)
    if modules.named:
        _check_length("$.modules.named", modules.named, count)
        if modules.named[0]:
            _fail("$.modules.named", "the first module must be the root, with an empty path")
        for i, kind in enumerate(modules.kinds):
            if kind.children:
                _fail(f"$.modules.kinds[{i}].children", "there are none where every path is given")
        return
    inside = [len(kind.children) for kind in modules.kinds]
    announced = accumulate(map(inside.__getitem__, modules.kind))
    # After module i, i + 1 others must have been announced if there is one more.
    if not all(map(gt, islice(announced, count - 1), range(count))) or next(announced) != count - 1:
        _fail("$.modules.kind", f"the modules inside others do not add up to {count} modules")


# ---- values ------------------------------------------------------------------------------------------------------------------


def _check_values(manifest: Manifest) -> None:
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
        if not isinstance(edit.value, _SCALARS):
            _check_value(f"$.edits[{i}].value", edit.value, tensors, objects)
    for i, class_edit in enumerate(manifest.class_edits):
        _check_value(f"$.class_edits[{i}].before", class_edit.before, tensors, objects)
        _check_value(f"$.class_edits[{i}].after", class_edit.after, tensors, objects)
    for i, kind in enumerate(manifest.tensors.kinds):
        for name, value in kind.attributes:
            _check_value(f"$.tensors.kinds[{i}].attributes.{name}", value, tensors, objects)


def _check_value(path: str, value: Value | None, tensors: int, objects: int) -> None:
    """Check every number of a tensor or an object, however deep inside of a value it is."""
    ahead: list[object] = [value]
    while ahead:
        node = ahead.pop()
        if isinstance(node, tuple):
            ahead += node
        elif isinstance(node, msgspec.Struct):
            if isinstance(node, VTensor) and not 0 <= node.index < tensors:
                _fail(path, f"no tensor {node.index}")
            if isinstance(node, (VObject, VTupleLike)) and not 0 <= node.index < objects:
                _fail(path, f"no object {node.index}")
            ahead += [getattr(node, name) for name in node.__struct_fields__]
