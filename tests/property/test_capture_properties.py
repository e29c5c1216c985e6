"""Whatever a module tree looks like: what is attached is what was loaded, or the publish was refused."""

from __future__ import annotations

import collections
import enum
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.roundtrip import CPU, Publication, build_meta, capture_loaded
from torch import nn

from torchwcache.errors import CaptureError
from torchwcache.module.capture import capture
from torchwcache.module.parity import compare_modules
from torchwcache.module.reachability import find_meta_tensors

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Pair = collections.namedtuple("Pair", "first second")


@dataclass
class Spec:
    """One module: what its ``__init__`` does, and what its load does. Plain data, so that every build of it is alike."""

    parameters: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    buffers: list[tuple[tuple[int, ...], torch.dtype, bool]] = field(default_factory=list)
    tie: bool = False
    views: list[str] = field(default_factory=list)
    holder: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    children: list[Spec] = field(default_factory=list)
    share_child: bool = False
    after: dict[str, Any] = field(default_factory=dict)
    removed: bool = False
    new_tensor: str = ""


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(), st.text(max_size=5), st.sampled_from(list(Color)),
    st.sampled_from(DTYPES), st.binary(max_size=3), st.just(CPU), st.complex_numbers(),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3),
        st.frozensets(st.integers(0, 5), max_size=3),
    ),
    max_leaves=6,
)
names = st.sampled_from(["alpha", "beta", "gamma"])
specs: st.SearchStrategy[Spec] = st.deferred(
    lambda: st.builds(
        Spec,
        parameters=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=3),
        buffers=st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), max_size=2),
        tie=st.booleans(),
        views=st.lists(st.sampled_from(["t", "slice", "flat", "self"]), max_size=2),
        holder=st.sampled_from(["", "list", "dict", "tuple", "named", "closure", "deque", "nested"]),
        attributes=st.dictionaries(names, values, max_size=2),
        children=st.lists(specs, max_size=2),
        share_child=st.booleans(),
        after=st.dictionaries(names, values, max_size=2),
        removed=st.booleans(),
        new_tensor=st.sampled_from(["", "plain", "view", "buffer", "strided"]),
    )
)


class Node(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        for i, (shape, dtype) in enumerate(spec.parameters):
            grad = dtype.is_floating_point and dtype.itemsize > 1
            setattr(self, f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=grad))
        for i, (shape, dtype, persistent) in enumerate(spec.buffers):
            self.register_buffer(f"b{i}", torch.zeros(shape, dtype=dtype), persistent=persistent)
        if spec.tie and spec.parameters:
            self.tied = self.p0
        for name, value in spec.attributes.items():
            setattr(self, name, _fresh(value))
        self.blocks = nn.ModuleList(Node(child) for child in spec.children)
        if spec.share_child and spec.children:
            self.again = self.blocks[0]
        self.views = [_view(self, kind) for kind in spec.views]
        self.held = _holder(self, spec.holder)


def _fresh(value: Any) -> Any:
    """A container of its own for every module that is built."""
    if isinstance(value, list):
        return [_fresh(item) for item in value]
    if isinstance(value, dict):
        return {key: _fresh(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_fresh(item) for item in value)
    return value


def _view(module: nn.Module, kind: str) -> Any:
    base = getattr(module, "p0", None)
    if base is None:
        return None
    data = base.data
    return {"t": lambda: data.t() if data.dim() <= 2 else data, "slice": lambda: data[1:] if data.dim() else data,
            "flat": lambda: data.view(-1), "self": lambda: base}[kind]()  # fmt: skip


def _holder(module: nn.Module, kind: str) -> Any:
    tensor = getattr(module, "p0", None)
    if tensor is None:
        return kind
    return {
        "": lambda: None,
        "list": lambda: [tensor, 1, [tensor]],
        "dict": lambda: {"w": tensor, 2: {"x": tensor.data}},
        "tuple": lambda: (tensor, "x"),
        "named": lambda: Pair(tensor, (1, tensor)),
        "closure": lambda: lambda factor=tensor: (factor, tensor),
        "deque": lambda: collections.deque([tensor], maxlen=4),
        "nested": lambda: [{"a": ([tensor],)}],
    }[kind]()


def load(module: Node, spec: Spec, generator: torch.Generator) -> None:
    """What a loader does: fill in place, stamp attributes, drop and add tensors."""
    with torch.no_grad():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            _fill(tensor, generator)
    for name, value in spec.after.items():
        setattr(module, name, _fresh(value))
    if spec.removed and spec.attributes:
        delattr_name = sorted(spec.attributes)[0]
        if hasattr(module, delattr_name):
            delattr(module, delattr_name)
    base = getattr(module, "p0", None)
    if spec.new_tensor == "plain":
        module.derived = torch.randn(3, generator=generator)
    elif spec.new_tensor == "view" and base is not None:
        module.derived = [base.data, {"v": base.data.view(-1)}]
    elif spec.new_tensor == "buffer":
        module.register_buffer("derived_buffer", torch.arange(4), persistent=False)
    elif spec.new_tensor == "strided":
        whole = torch.randn(6, 4, generator=generator)
        module.derived = (whole[::2, 1], whole.as_strided((3, 3), (4, 1), 2))
    for child, child_spec in zip(module.blocks, spec.children, strict=True):
        load(child, child_spec, generator)  # type: ignore[arg-type]


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    if tensor.numel():
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        raw.copy_(torch.randint(0, 2 if tensor.dtype is torch.bool else 120, raw.shape, generator=generator, dtype=torch.uint8))


@settings(max_examples=150, suppress_health_check=[HealthCheck.data_too_large])
@given(spec=specs, requires_grad=st.booleans(), construction=st.sampled_from(["meta", "parameters-meta"]))
def test_attached_is_loaded(spec: Spec, requires_grad: bool, construction: str) -> None:
    def build() -> Node:
        return Node(spec)

    generator = torch.Generator().manual_seed(0)
    loaded = build().eval()
    load(loaded, spec, generator)
    reference = build().eval()
    load(reference, spec, torch.Generator().manual_seed(0))

    publication = Publication(capture_loaded(loaded, build, construction=construction))
    attached, report = publication.attach(build, requires_grad=requires_grad, construction=construction)

    assert not find_meta_tensors(attached)
    for module in (loaded, attached):
        result = compare_modules(reference, module, requires_grad=requires_grad and module is attached)
        assert result.equal, [str(difference) for difference in result.differences]
    if not requires_grad:
        assert not any(p.requires_grad for p in attached.parameters())
    assert report.mapped_nbytes + report.copied_nbytes == sum(s.nbytes for s in publication.manifest().storages)


@settings(max_examples=60, suppress_health_check=[HealthCheck.data_too_large])
@given(spec=specs, attribute=names, opaque=st.sampled_from([object, lambda: iter([1]), lambda: lambda: 1, lambda: [object()]]))
def test_what_cannot_be_carried_is_refused(spec: Spec, attribute: str, opaque: Any) -> None:
    loaded = Node(spec)
    built = build_meta(lambda: Node(spec))
    setattr(loaded, f"late_{attribute}", opaque())
    with pytest.raises(CaptureError) as caught:
        capture(loaded, built, device=CPU)
    assert any(path.startswith(f"late_{attribute}") for path, _ in caught.value.problems)
