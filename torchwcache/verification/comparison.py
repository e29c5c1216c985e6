"""Compare two descriptions: every difference, by path. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgspec

from torchwcache.encoding import Value, decode, to_bytes
from torchwcache.errors import EncodingError
from torchwcache.module.difference import Difference, partition_differences
from torchwcache.verification.description import ModuleDescription, OutputFacts, StateFacts

__all__ = ["Compared", "compare_descriptions", "compare_outputs"]

_T = TypeVar("_T")

_MODULE_FACTS = {
    "cls": "class",
    "training": "training",
    "parameters": "names in _parameters",
    "buffers": "names in _buffers",
    "modules": "names in _modules",
    "transient": "non-persistent buffers",
}
_TENSOR_FACTS = {
    "kind": "kind",
    "cls": "class",
    "dtype": "dtype",
    "shape": "shape",
    "stride": "stride",
    "device": "device",
    "requires_grad": "requires_grad",
    "offset": "offset in shared memory (bytes)",
    "digest": "values (xxh3-128)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How much was compared.

    Attributes:
        modules: Paths of modules.
        tensors: Places that hold tensors.
        storages: Pieces of memory.
        nbytes: Bytes of all memory that was hashed.
        attributes: Places that hold anything else.
        class_attributes: Attributes of classes.
        opaque: Paths of which only the type could be compared.
        outputs: Tensors of the answer.
        output_nbytes: Their bytes.
    """

    modules: int = 0
    tensors: int = 0
    storages: int = 0
    nbytes: int = 0
    attributes: int = 0
    class_attributes: int = 0
    opaque: tuple[str, ...] = ()
    outputs: int = 0
    output_nbytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def compare_descriptions(expected: ModuleDescription, found: ModuleDescription) -> tuple[tuple[Difference, ...], Compared]:
    """Compare two module states.

    Args:
        expected: The reference, such as a fresh load.
        found: What is to be like it, such as an attached module.
    """
    differences = [
        *_facts("(what is left out)", expected, found, {"ignored": "patterns of paths"}),
        *_modules(expected, found),
        *_tensors(expected, found),
        *_storages(expected, found),
        *_state(expected.state, found.state, "attribute"),
        *_state(expected.classes, found.classes, "class attribute"),
    ]
    compared = Compared(
        modules=len(expected.modules),
        tensors=len(expected.tensors),
        storages=len(expected.storages),
        nbytes=sum(storage.nbytes for storage in expected.storages.values()),
        attributes=len(expected.state),
        class_attributes=len(expected.classes),
        opaque=tuple(path for path, facts in {**expected.state, **expected.classes}.items() if facts.kind == "opaque"),
    )
    return tuple(differences), compared


def compare_outputs(expected: Mapping[str, OutputFacts], found: Mapping[str, OutputFacts]) -> tuple[Difference, ...]:
    """Compare two answers, bit for bit."""
    differences = list(_missing(expected, found, "output", "an output"))
    for path in _common(expected, found):
        a, b = expected[path], found[path]
        for name, what in (("dtype", "dtype"), ("shape", "shape"), ("digest", "values (xxh3-128)")):
            x, y = getattr(a, name), getattr(b, name)
            if x != y:
                differences.append(Difference(path, f"output's {what}", str(x), str(y)))
    return tuple(differences)


def _common(expected: Mapping[str, _T], found: Mapping[str, _T]) -> list[str]:
    return [path for path in expected if path in found]


def _missing(expected: Mapping[str, _T], found: Mapping[str, _T], what: str, one: str) -> Iterator[Difference]:
    for path in sorted(expected.keys() - found.keys()):
        yield Difference(path or "(root)", what, one, "nothing")
    for path in sorted(found.keys() - expected.keys()):
        yield Difference(path or "(root)", what, "nothing", one)


def _same(
    common: list[str],
    expected: Mapping[str, _T],
    found: Mapping[str, _T],
    key: Callable[[str, _T], Hashable],
    what: str,
) -> Iterator[Difference]:
    a, b = ([key(path, side[path]) for path in common] for side in (expected, found))
    return partition_differences(common, a, b, what)


def _facts(path: str, a: msgspec.Struct, b: msgspec.Struct, names: Mapping[str, str]) -> Iterator[Difference]:
    for name, what in names.items():
        x, y = getattr(a, name), getattr(b, name)
        if x != y:
            yield Difference(path or "(root)", what, _listed(x), _listed(y))


def _listed(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _modules(expected: ModuleDescription, found: ModuleDescription) -> Iterator[Difference]:
    yield from _missing(expected.modules, found.modules, "module", "a module")
    common = _common(expected.modules, found.modules)
    for path in common:
        yield from _facts(path, expected.modules[path], found.modules[path], _MODULE_FACTS)
    yield from _same(common, expected.modules, found.modules, lambda path, facts: facts.same_as, "is the same module as")


def _tensors(expected: ModuleDescription, found: ModuleDescription) -> Iterator[Difference]:
    yield from _missing(expected.tensors, found.tensors, "tensor", "a tensor")
    common = _common(expected.tensors, found.tensors)
    for path in common:
        yield from _facts(path, expected.tensors[path], found.tensors[path], _TENSOR_FACTS)
    yield from _same(common, expected.tensors, found.tensors, lambda path, facts: facts.same_as, "is the same tensor as")
    # A tensor without memory shares none: each is alone.
    yield from _same(common, expected.tensors, found.tensors, lambda path, facts: facts.storage or (path,), "shares memory with")


def _storages(expected: ModuleDescription, found: ModuleDescription) -> Iterator[Difference]:
    # A storage that only one side has is named by the tensors: one of them is missing, or shares its memory with others.
    for path in _common(expected.storages, found.storages):
        names = {"nbytes": "bytes of its memory", "digest": "bytes of its memory (xxh3-128)", "members": "tensors in its memory"}
        yield from _facts(path, expected.storages[path], found.storages[path], names)


def _state(expected: Mapping[str, StateFacts], found: Mapping[str, StateFacts], what: str) -> Iterator[Difference]:
    for path in sorted(expected.keys() - found.keys()):
        yield Difference(path, what, _words(expected[path]), "nothing")
    for path in sorted(found.keys() - expected.keys()):
        yield Difference(path, what, "nothing", _words(found[path]))
    common = _common(expected, found)
    for path in common:
        a, b = expected[path], found[path]
        if (a.type, _bytes(a.value)) != (b.type, _bytes(b.value)):
            yield Difference(path, what, _words(a), _words(b))
    yield from _same(common, expected, found, lambda path, facts: facts.same_as or (path,), "is the same object as")


def _bytes(value: Value | None) -> bytes:
    # Bytes, not values: NaN is equal to itself, 0.0 is not -0.0. The order of a dict's keys counts.
    return b"" if value is None else to_bytes(value)


def _words(facts: StateFacts) -> str:
    if facts.value is None:
        return f"a {facts.type}"
    try:
        text = repr(decode(facts.value, leaf=lambda node: node))
    except EncodingError:  # an enum: its class is not loaded here
        text = repr(facts.value)
    return text if facts.kind == "value" else f"a {facts.type} of {text}"
