"""Parity: are two modules the same, down to the bits, the sharing and the Python-side state?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.encoding import Value, VStr, VTensor, VWeakref, encode, to_bytes
from torchwcache.errors import EncodingError
from torchwcache.manifest import Edit
from torchwcache.module.difference import Difference, partition_differences
from torchwcache.module.pairing import Pairing
from torchwcache.module.replace import replace_tensors
from torchwcache.module.storages import byte_view, dtype_name, group_storages, tensor_extent
from torchwcache.module.tensors import TensorTable, class_name_of

__all__ = ["Difference", "ParityReport", "compare_modules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """The outcome of a comparison: every difference, and how much was compared."""

    differences: tuple[Difference, ...]
    tensors: int
    nbytes: int

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "equal": self.equal,
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "differences": [{"path": d.path, "what": d.what, "expected": d.expected, "found": d.found} for d in self.differences],
        }


def compare_modules(
    expected: nn.Module, found: nn.Module, *, rules: CaptureRules | None = None, requires_grad: bool = False
) -> ParityReport:
    """Compare two modules.

    Compared are: module tree and classes; for each tensor its place, kind, class, shape, dtype, stride, whether it is persistent,
    and the xxh3-128 digest of its storage; which places hold one and the same tensor; which tensors share memory, and how; and
    every Python-side attribute that a capture would carry.

    Args:
        expected: The reference, such as a fresh load.
        found: What is to be like it, such as an attached module.
        rules: Attributes to leave out.
        requires_grad: Compare ``requires_grad``, too (an attach clears it by default).
    """
    rules = rules or CaptureRules()
    mine, theirs = _places(expected), _places(found)
    differences: list[Difference] = []
    for path in sorted(mine.keys() - theirs.keys()):
        differences.append(Difference(path, "tensor", "a tensor", "nothing"))
    for path in sorted(theirs.keys() - mine.keys()):
        differences.append(Difference(path, "tensor", "nothing", "a tensor"))
    common = [path for path in mine if path in theirs]
    left, right = [mine[path] for path in common], [theirs[path] for path in common]
    for path, a, b in zip(common, left, right, strict=True):
        differences += _tensor_differences(path, a, b, requires_grad)
        differences += _tensor_attribute_differences(path, a, b)
    differences += partition_differences(common, [id(t) for t in left], [id(t) for t in right], "is the same tensor as")
    differences += _storage_differences(common, left, right)
    differences += _persistence_differences(expected, found)
    differences += _state_differences(expected, found, rules)
    nbytes = sum(t.numel() * t.element_size() for t in {id(t): t for t in left}.values())
    return ParityReport(differences=tuple(differences), tensors=len(mine), nbytes=nbytes)


def _places(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every place that holds a tensor; those of the tables first, under every path of a shared module."""
    found: dict[str, torch.Tensor] = {}
    for path, item in module.named_modules(remove_duplicate=False):
        for table in ("_parameters", "_buffers"):
            for name, tensor in getattr(item, table).items():
                if tensor is not None:
                    found[f"{path}.{name}" if path else name] = tensor

    def note(tensor: torch.Tensor, path: str) -> None:
        found.setdefault(path, tensor)

    replace_tensors(module, note)
    return found


def _tensor_differences(path: str, a: torch.Tensor, b: torch.Tensor, requires_grad: bool) -> Iterable[Difference]:
    facts: list[tuple[str, Callable[[torch.Tensor], object]]] = [
        ("class", class_name_of),
        ("dtype", lambda t: dtype_name(t.dtype)),
        ("shape", lambda t: tuple(t.shape)),
        ("stride", lambda t: tuple(t.stride())),
        ("device", lambda t: str(t.device)),
    ]
    if requires_grad:
        facts.append(("requires_grad", lambda t: t.requires_grad))
    same = True
    for what, fact in facts:
        x, y = fact(a), fact(b)
        if x != y:
            same = False
            yield Difference(path, what, str(x), str(y))
    if same and a.numel() and not a.is_meta and not b.is_meta:
        x, y = _digest(a), _digest(b)
        if x != y:
            yield Difference(path, "values (xxh3-128)", x, y)


def _tensor_attribute_differences(path: str, a: torch.Tensor, b: torch.Tensor) -> Iterable[Difference]:
    mine, theirs = _plain_attributes(a), _plain_attributes(b)
    for name in sorted(mine.keys() | theirs.keys()):
        x, y = mine.get(name), theirs.get(name)
        if x is None or y is None or to_bytes(x) != to_bytes(y):
            yield Difference(f"{path}.{name}", "attribute of the tensor", repr(x), repr(y))


def _plain_attributes(tensor: torch.Tensor) -> dict[str, Value]:
    """What a tensor's ``__dict__`` holds, in tagged form; other tensors and opaque objects by their type (both are made anew)."""

    def opaque(obj: object, path: str) -> Value | None:
        return VStr(type(obj).__qualname__) if isinstance(obj, torch.Tensor) else None

    found: dict[str, Value] = {}
    for name, value in tensor.__dict__.items():
        try:
            found[name] = encode(value, path=name, hook=opaque)
        except EncodingError:
            found[name] = VStr(type(value).__qualname__)
    return found


def _digest(tensor: torch.Tensor) -> str:
    import xxhash

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    storage = plain.untyped_storage()
    offset = plain.storage_offset() * plain.element_size()
    data: Any = byte_view(storage, int(offset), plain.numel() * plain.element_size()).numpy()
    return xxhash.xxh3_128_hexdigest(data)


def _storage_differences(paths: Sequence[str], a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> Iterable[Difference]:
    if any(t.is_meta for t in (*a, *b)):
        return
    sides = []
    for tensors in (a, b):
        groups = group_storages(tensors)
        owner = {i: (number, group.start) for number, group in enumerate(groups) for i in group.members}
        # Tensors without elements share nothing.
        numbers = [owner[i][0] if i in owner else -1 - i for i in range(len(tensors))]
        firsts: dict[int, int] = {}
        for i, number in enumerate(numbers):
            firsts.setdefault(number, tensor_extent(tensors[i])[0])
        offsets = [tensor_extent(t)[0] - firsts[numbers[i]] if i in owner else 0 for i, t in enumerate(tensors)]
        sides.append((numbers, offsets))
    (numbers_a, offsets_a), (numbers_b, offsets_b) = sides
    yield from partition_differences(paths, numbers_a, numbers_b, "shares memory with")
    for i, path in enumerate(paths):
        if offsets_a[i] != offsets_b[i]:
            yield Difference(path, "offset in shared memory (bytes)", str(offsets_a[i]), str(offsets_b[i]))


def _persistence_differences(expected: nn.Module, found: nn.Module) -> Iterable[Difference]:
    others = dict(found.named_modules(remove_duplicate=False))
    for path, module in expected.named_modules(remove_duplicate=False):
        other = others.get(path)
        if other is None:
            continue  # named by the comparison of the trees
        for what in ("_parameters", "_buffers"):
            x, y = list(getattr(module, what)), list(getattr(other, what))
            if x != y:
                yield Difference(path, f"names in {what}", str(x), str(y))
        x, y = sorted(module._non_persistent_buffers_set), sorted(other._non_persistent_buffers_set)
        if x != y:
            yield Difference(path, "non-persistent buffers", str(x), str(y))
        if module.training != other.training:
            yield Difference(path, "training", str(module.training), str(other.training))


def _state_differences(expected: nn.Module, found: nn.Module, rules: CaptureRules) -> Iterable[Difference]:
    pairing = Pairing(expected, found, TensorTable(torch.device("cpu")), rules)
    pairing.run()
    for path, reason in pairing.problems:
        yield Difference(path, "state", "something comparable", reason)
    for edit, path in zip(pairing.edits, pairing.edit_paths, strict=True):
        if not _is_tensor_edit(edit):
            yield Difference(path, "attribute", repr(edit.value), "another value")


def _is_tensor_edit(edit: Edit) -> bool:
    return edit.value is not None and _holds_tensor(edit.value)


def _holds_tensor(value: Value) -> bool:
    # Places that hold tensors are noted as edits in any case; the tensors themselves were compared above.
    if isinstance(value, VTensor):
        return True
    if isinstance(value, VWeakref):
        return _holds_tensor(value.target)
    items = getattr(value, "items", None)
    return isinstance(items, tuple) and any(_holds_tensor(item) for item in items if not isinstance(item, tuple))
