"""The tables of a manifest: storages, tensors and modules, by column.

A model repeats itself: a hundred thousand tensors are a few *kinds* of tensor in a few *kinds* of module. So what is alike is said
once, and what is left for each is a few integers that stand in columns: a client reads, checks and compares a column in one step.
The tables are read as sequences of the specs that they were made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

import msgspec

from torchwcache.encoding import Value
from torchwcache.errors import ManifestError
from torchwcache.manifest.columns import Column
from torchwcache.manifest.values import Spec

__all__ = [
    "Attributes",
    "ModuleKind",
    "ModuleSpec",
    "Modules",
    "StorageSpec",
    "Storages",
    "TensorKind",
    "TensorSpec",
    "Tensors",
    "pack_modules",
    "pack_storages",
    "pack_tensors",
]

_T = TypeVar("_T")

Attributes = tuple[tuple[str, Value], ...]
"""Attributes by name, in their order."""

_encoder = msgspec.msgpack.Encoder()
_NONE = Column()

_PATHS_MAX_CHARACTERS = 1 << 28
"""Paths of one model, all together: they are made here from much less, so nothing else bounds them."""


# ---- storages ----------------------------------------------------------------------------------------------------------------


class StorageSpec(Spec, frozen=True):
    """One storage: ``nbytes`` bytes at ``offset`` of segment number ``segment``.

    ``shared``: mapped by every client, read-only; otherwise each client gets a private copy of the bytes. ``host``: that copy
    lies in host memory, although the entry lies on a device (a module on a GPU that keeps small tensors on the CPU).
    """

    segment: int
    offset: int
    nbytes: int
    shared: bool
    host: bool = False


class Storages(Spec, frozen=True):
    """All storages, each a row of ``segment``, ``offset`` and ``nbytes``.

    ``private`` has the numbers of those that are not shared, ``host`` of those among them that are copied into host memory.
    """

    segment: Column
    offset: Column
    nbytes: Column
    private: Column = _NONE
    host: Column = _NONE

    def __len__(self) -> int:
        return len(self.segment)

    def __getitem__(self, number: int) -> StorageSpec:
        shared, host = number not in self.private, number in self.host
        return StorageSpec(self.segment[number], self.offset[number], self.nbytes[number], shared, host)

    def __iter__(self) -> Iterator[StorageSpec]:
        private, host = set(self.private), set(self.host)
        for number, row in enumerate(zip(self.segment, self.offset, self.nbytes, strict=True)):
            yield StorageSpec(*row, number not in private, number in host)


def pack_storages(specs: Sequence[StorageSpec]) -> Storages:
    """Put storages into columns."""
    return Storages(
        segment=Column([spec.segment for spec in specs]),
        offset=Column([spec.offset for spec in specs]),
        nbytes=Column([spec.nbytes for spec in specs]),
        private=Column([number for number, spec in enumerate(specs) if not spec.shared]),
        host=Column([number for number, spec in enumerate(specs) if spec.host]),
    )


# ---- tensors -----------------------------------------------------------------------------------------------------------------


class TensorKind(Spec, frozen=True):
    """What many tensors have in common: all but where they lie.

    ``stride`` counts elements. ``cls`` is ``""`` for ``torch.Tensor``, ``"Parameter"`` for ``torch.nn.Parameter``, else
    ``"module:qualname"``. ``flags`` may hold ``conj`` and ``neg``. ``attributes`` are the entries of the tensor's ``__dict__`` that
    are carried by value; those in ``inherited`` are taken over from the tensor that the build put in the same place, attributes or
    properties there (bound ``weight_loader`` methods and the like).
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    cls: str
    requires_grad: bool
    flags: tuple[Literal["conj", "neg"], ...] = ()
    attributes: Attributes = ()
    inherited: tuple[str, ...] = ()


class TensorSpec(Spec, frozen=True):
    """One tensor object.

    ``storage`` is -1 for a tensor without bytes, -2 for one in host memory although the entry lies on a device. ``offset`` counts
    elements from the start of the storage.
    """

    kind: TensorKind
    storage: int
    offset: int = 0


class Tensors(Spec, frozen=True):
    """All tensors: number ``i`` is of kind ``kinds[kind[i]]`` and lies in storage ``storage[i]``.

    ``offsets`` has ``(number, offset)`` for those that do not start where their storage starts.
    """

    kinds: tuple[TensorKind, ...]
    kind: Column
    storage: Column
    offsets: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, number: int) -> TensorSpec:
        return TensorSpec(self.kinds[self.kind[number]], self.storage[number], dict(self.offsets).get(number, 0))

    def __iter__(self) -> Iterator[TensorSpec]:
        offsets = dict(self.offsets)
        for number, (kind, storage) in enumerate(zip(self.kind, self.storage, strict=True)):
            yield TensorSpec(self.kinds[kind], storage, offsets.get(number, 0))


def pack_tensors(specs: Sequence[TensorSpec]) -> Tensors:
    """Put tensors into columns, and each kind of them once."""
    kinds, column = _distinct([spec.kind for spec in specs])
    return Tensors(
        kinds=kinds,
        kind=column,
        storage=Column([spec.storage for spec in specs]),
        offsets=tuple([(number, spec.offset) for number, spec in enumerate(specs) if spec.offset]),
    )


# ---- modules -----------------------------------------------------------------------------------------------------------------


class ModuleSpec(Spec, frozen=True):
    """One module of the tree.

    ``cls`` is ``"module:qualname"``. ``same_as`` is the number of the first path of a module that appears more than once, else
    -1; parameters, buffers and attributes are given at the first path only. ``parameters`` and ``buffers`` list every name in its
    order with the number of its tensor, -1 where the module holds ``None``; buffers carry ``persistent``. ``attributes`` are the
    plain values that the build resolves.
    """

    path: str
    cls: str
    training: bool
    same_as: int = -1
    parameters: tuple[tuple[str, int], ...] = ()
    buffers: tuple[tuple[str, bool, int], ...] = ()
    attributes: Attributes = ()


class ModuleKind(Spec, frozen=True):
    """What many modules have in common, and a column for what they have not: its row ``i`` is that of their ``i``-th module.

    ``children`` are the names of the modules inside, in their order. ``same_as`` is empty if the modules are at their first path.
    ``attributes`` have the values that occur and, if there are several, the number of one for each module.
    """

    cls: str
    training: bool
    children: tuple[str, ...] = ()
    parameters: tuple[tuple[str, Column], ...] = ()
    buffers: tuple[tuple[str, bool, Column], ...] = ()
    attributes: tuple[tuple[str, tuple[Value, ...], Column], ...] = ()
    same_as: Column = _NONE


class Modules(Spec, frozen=True):
    """All modules in ``named_modules(remove_duplicate=False)`` order: number ``i`` is of kind ``kinds[kind[i]]``.

    The kinds' ``children`` say what lies inside what. Only where a class names its modules in a way of its own, ``named`` has every
    path, and ``children`` are empty.
    """

    kinds: tuple[ModuleKind, ...]
    kind: Column
    named: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.kind)

    def __iter__(self) -> Iterator[ModuleSpec]:
        rows = [0] * len(self.kinds)
        for path, number in zip(self.paths(), self.kind, strict=True):
            kind, row = self.kinds[number], rows[number]
            rows[number] += 1
            yield ModuleSpec(
                path=path,
                cls=kind.cls,
                training=kind.training,
                same_as=kind.same_as[row] if kind.same_as else -1,
                parameters=tuple([(name, column[row]) for name, column in kind.parameters]),
                buffers=tuple([(name, persistent, column[row]) for name, persistent, column in kind.buffers]),
                attributes=tuple([(name, values[which[row] if which else 0]) for name, values, which in kind.attributes]),
            )

    def paths(self) -> list[str]:
        """The path of every module.

        Raises:
            ManifestError: They would fill memory: no real model has such.
        """
        if self.named:
            return list(self.named)
        found: list[str] = []
        ahead, characters = [""], 0
        for number in self.kind:
            path = ahead.pop()
            found.append(path)
            characters += len(path)
            if characters > _PATHS_MAX_CHARACTERS:
                raise ManifestError("$.modules: the paths are longer than those of any model", path="$.modules")
            children = self.kinds[number].children
            if children:
                prefix = f"{path}." if path else ""
                ahead += [prefix + name for name in reversed(children)]
        return found


def pack_modules(specs: Sequence[ModuleSpec]) -> Modules:
    """Put modules into columns, and each kind of them once."""
    paths = [spec.path for spec in specs]
    children = _children(paths)
    if children is not None:
        packed = _packed(specs, children)
        if packed.paths() == paths:
            return packed
    return msgspec.structs.replace(_packed(specs, [()] * len(specs)), named=tuple(paths))


def _packed(specs: Sequence[ModuleSpec], children: Sequence[tuple[str, ...]]) -> Modules:
    numbers: dict[bytes, int] = {}
    members: list[list[int]] = []
    column: list[int] = []
    for number, spec in enumerate(specs):
        alike = (
            spec.cls, spec.training, spec.same_as >= 0, children[number], [name for name, _ in spec.parameters],
            [(name, persistent) for name, persistent, _ in spec.buffers], [name for name, _ in spec.attributes],
        )  # fmt: skip
        kind = numbers.setdefault(_encoder.encode(alike), len(numbers))
        if kind == len(members):
            members.append([])
        members[kind].append(number)
        column.append(kind)
    kinds = [_module_kind([specs[number] for number in group], children[group[0]]) for group in members]
    return Modules(tuple(kinds), Column(column))


def _children(paths: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Names of the modules inside each one; ``None`` if the paths say of one that it lies inside none that comes before it."""
    found: list[list[str]] = []
    numbers: dict[str, int] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        if found:
            if parent not in numbers or path in numbers:
                return None
            found[numbers[parent]].append(name)
        numbers[path] = len(found)
        found.append([])
    return [tuple(names) for names in found]


def _module_kind(specs: Sequence[ModuleSpec], children: tuple[str, ...]) -> ModuleKind:
    first = specs[0]
    columns = [[tensor for *_, tensor in (*spec.parameters, *spec.buffers)] for spec in specs]
    rows = [Column(column) for column in zip(*columns, strict=True)]
    values = [tuple(column) for column in zip(*[[value for _, value in spec.attributes] for spec in specs], strict=True)]
    split = len(first.parameters)
    return ModuleKind(
        cls=first.cls,
        training=first.training,
        children=children,
        parameters=tuple([(name, rows[i]) for i, (name, _) in enumerate(first.parameters)]),
        buffers=tuple([(name, keep, rows[split + i]) for i, (name, keep, _) in enumerate(first.buffers)]),
        attributes=tuple([(name, *_values(values[i])) for i, (name, _) in enumerate(first.attributes)]),
        same_as=Column([spec.same_as for spec in specs]) if first.same_as >= 0 else _NONE,
    )


def _values(values: Sequence[Value]) -> tuple[tuple[Value, ...], Column]:
    found, which = _distinct(values)
    return found, which if len(found) > 1 else _NONE


def _distinct(items: Sequence[_T]) -> tuple[tuple[_T, ...], Column]:
    """The items that occur, each once in every bit (NaN is NaN, 0.0 is not -0.0), and which one it is each time."""
    found: dict[bytes, _T] = {}
    numbers: dict[bytes, int] = {}
    which: list[int] = []
    for item in items:
        key = _encoder.encode(item)
        which.append(numbers.setdefault(key, len(numbers)))
        found.setdefault(key, item)
    return tuple(found.values()), Column(which)
