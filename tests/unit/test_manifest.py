"""Nothing in a manifest is believed before it is checked; and what goes into its tables comes out of them."""

from __future__ import annotations

import copy
import pickle
import resource
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.roundtrip import Publication, capture_loaded
from torch import nn

from torchwcache.encoding import (
    VBool,
    VDeque,
    VDict,
    VFloat,
    VInt,
    VList,
    VNull,
    VObject,
    VSlice,
    VStr,
    VTensor,
    VTuple,
    VTupleLike,
    VWeakref,
)
from torchwcache.errors import ManifestError
from torchwcache.manifest import (
    ClassEdit,
    Column,
    Edit,
    Manifest,
    ModuleSpec,
    ObjectSpec,
    Step,
    StorageSpec,
    TensorKind,
    TensorSpec,
    decode_manifest,
    encode_manifest,
    pack_modules,
    pack_storages,
    pack_tensors,
    validate,
)
from torchwcache.manifest.columns import pack_column, unpack_column


class Net(nn.Module):
    """Two layers that are alike, one of them at two paths, a buffer of each sort, a place for none, and two over one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), self.first])
        both = torch.randn(6)
        self.left, self.right = nn.Parameter(both[:2]), nn.Parameter(both[2:])
        self.register_parameter("nothing", None)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(5), persistent=False)


@pytest.fixture(scope="module")
def publication() -> Publication:
    return Publication(capture_loaded(Net().eval(), Net))


def put(obj: Any, path: str, value: Any) -> Any:
    """A manifest with another value at ``a.0.b``: field ``b`` of item 0 of field ``a``."""
    head, _, rest = path.partition(".")
    inner = obj[int(head)] if isinstance(obj, (tuple, Column)) else getattr(obj, head)
    new = put(inner, rest, value) if rest else Column(value) if isinstance(inner, Column) else value
    if isinstance(obj, Column):
        return Column([*obj[: int(head)], new, *obj[int(head) + 1 :]])
    if isinstance(obj, tuple):
        return (*obj[: int(head)], new, *obj[int(head) + 1 :])
    return msgspec.structs.replace(obj, **{head: new})


def check(publication: Publication, manifest: Manifest) -> None:
    sizes = [publication.memory.size_of(fd) for fd in publication.fds]
    validate(decode_manifest(encode_manifest(manifest)), sizes)


def place_of(publication: Publication, what: str) -> str:
    """Where in the tables something of :class:`Net` is described."""
    manifest = publication.manifest()
    linear, again, root = (
        next(i for i, kind in enumerate(manifest.modules.kinds) if found(kind))
        for found in (
            lambda kind: kind.cls.endswith(":Linear") and not kind.same_as,
            lambda kind: kind.same_as,
            lambda kind: kind.cls.endswith(":Net"),
        )
    )
    matrix = next(i for i, kind in enumerate(manifest.tensors.kinds) if kind.shape == (4, 4))
    return what.format(linear=linear, again=again, root=root, matrix=matrix)


def test_the_model_has_what_the_cases_below_change(publication: Publication) -> None:
    manifest = publication.manifest()
    assert manifest.modules.paths() == ["", "first", "layers", "layers.0", "layers.1"]
    assert [spec.same_as for spec in manifest.modules] == [-1, -1, -1, -1, 1]
    assert len(manifest.tensors.offsets) == 1
    check(publication, manifest)


BIG = 2**63 - 1
A_PARAMETERS = "that of a parameter"
"""The storage of a parameter: where it lies is up to the allocator."""


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("segments", (1,), "segments"),
        ("segments", (), "segments"),
        ("addresses", (1, 2, 3), "addresses"),
        ("addresses", (-1,), "addresses[0]"),
        ("addresses", (2**63,), "addresses[0]"),
        ("storages.segment.0", 9, "storages.segment[0]"),
        ("storages.segment.0", -1, "storages.segment[0]"),
        ("storages.segment.2", BIG, "storages.segment[2]"),
        ("storages.segment", (0,), "storages.offset"),
        ("storages.offset", (), "storages.offset"),
        ("storages.nbytes", (1,) * 99, "storages.nbytes"),
        ("storages.offset.1", 2**40, "storages.offset[1]"),
        ("storages.offset.1", BIG, "storages.offset[1]"),
        ("storages.offset.1", -64, "storages.offset[1]"),
        ("storages.nbytes.0", 2**40, "storages.offset[0]"),
        ("storages.nbytes.0", BIG, "storages.offset[0]"),
        ("storages.nbytes.0", 0, "storages.offset[0]"),
        ("storages.nbytes.0", -1, "storages.offset[0]"),
        ("storages.nbytes.0", 1, "tensors.storage[?]"),
        ("storages.private", (99,), "storages.private[0]"),
        ("storages.private", (-1,), "storages.private[0]"),
        ("storages.host", (A_PARAMETERS,), "storages.host[0]"),
        ("tensors.kind.1", 99, "tensors.kind[1]"),
        ("tensors.kind.1", -1, "tensors.kind[1]"),
        ("tensors.kind", (), "tensors.storage"),
        ("tensors.storage", (0,), "tensors.storage"),
        ("tensors.storage.0", 99, "tensors.storage[0]"),
        ("tensors.storage.0", -1, "tensors.storage[0]"),
        ("tensors.storage.0", -2, "tensors.storage[0]"),
        ("tensors.storage.0", -3, "tensors.storage[0]"),
        ("tensors.storage.0", BIG, "tensors.storage[0]"),
        ("tensors.offsets.0", (99, 0), "tensors.offsets[0]"),
        ("tensors.offsets.0", (-1, 0), "tensors.offsets[0]"),
        ("tensors.offsets.0", (0, 5), "tensors.offsets[0]"),
        ("tensors.offsets.0", (0, -1), "tensors.offsets[0]"),
        ("tensors.offsets.0", (0, 2**64 - 1), "tensors.offsets[0]"),
        ("tensors.kinds.{matrix}.dtype", "float31", "tensors.kinds[{matrix}].dtype"),
        ("tensors.kinds.{matrix}.dtype", "float64", "tensors.storage[?]"),
        ("tensors.kinds.{matrix}.shape", (4, 5), "tensors.storage[?]"),
        ("tensors.kinds.{matrix}.shape", (BIG, BIG), "tensors.kinds[{matrix}]"),
        ("tensors.kinds.{matrix}.shape", (0, 2**63), "tensors.kinds[{matrix}]"),
        ("tensors.kinds.{matrix}.shape", (2**32, 0, 2**32), "tensors.kinds[{matrix}].stride"),
        ("tensors.kinds.{matrix}.shape", (2**32, 2**32), "tensors.kinds[{matrix}]"),
        ("tensors.kinds.{matrix}.stride", (0, 2**63), "tensors.kinds[{matrix}]"),
        ("tensors.kinds.{matrix}.shape", (-4, -4), "tensors.kinds[{matrix}]"),
        ("tensors.kinds.{matrix}.shape", (4,), "tensors.kinds[{matrix}].stride"),
        ("tensors.kinds.{matrix}.stride", (4, -1), "tensors.kinds[{matrix}]"),
        ("tensors.kinds.{matrix}.stride", (2**61, 2**61), "tensors.storage[?]"),
        ("tensors.kinds.{matrix}.attributes", (("x", VTensor(99)),), "tensors.kinds[{matrix}].attributes.x"),
        ("modules.kind", (), "modules.kind"),
        ("modules.kind.1", 99, "modules.kind[1]"),
        ("modules.kind.1", -1, "modules.kind[1]"),
        ("modules.kinds.{root}.children", (), "modules.kind"),
        ("modules.kinds.{root}.children", ("first", "layers", "more"), "modules.kind"),
        ("modules.kinds.{linear}.children", ("x",), "modules.kind"),
        ("modules.kinds.{linear}.parameters.0", ("weight", Column([0])), "modules.kinds[{linear}].parameters[0]"),
        ("modules.kinds.{linear}.parameters.1", ("bias", Column([0, 99])), "modules.kinds[{linear}].parameters[1][1]"),
        ("modules.kinds.{linear}.parameters.1", ("bias", Column([-2, 0])), "modules.kinds[{linear}].parameters[1][0]"),
        ("modules.kinds.{root}.buffers.0", ("seen", True, Column()), "modules.kinds[{root}].buffers[0]"),
        ("modules.kinds.{root}.buffers.0", ("seen", True, Column([BIG])), "modules.kinds[{root}].buffers[0][0]"),
        ("modules.kinds.{linear}.attributes", (("x", (), Column()),), "modules.kinds[{linear}].attributes[0]"),
        ("modules.kinds.{linear}.attributes", (("x", (), Column([0, 0])),), "modules.kinds[{linear}].attributes[0][0]"),
        ("modules.kinds.{linear}.attributes", (("x", (VInt(1),), Column([0, 1])),), "modules.kinds[{linear}].attributes[0][1]"),
        ("modules.kinds.{linear}.attributes", (("x", (VInt(1),) * 3, Column([0])),), "modules.kinds[{linear}].attributes[0]"),
        (
            "modules.kinds.{linear}.attributes",
            (("x", (VInt(1),) * 3, Column([-1, 0])),),
            "modules.kinds[{linear}].attributes[0][0]",
        ),
        ("modules.kinds.{again}.same_as", (4,), "modules.kinds[{again}].same_as[0]"),
        ("modules.kinds.{again}.same_as", (-1,), "modules.kinds[{again}].same_as[0]"),
        ("modules.kinds.{again}.same_as", (1, 1), "modules.kinds[{again}].same_as"),
        ("modules.kinds.{again}.parameters", (("weight", Column([0])),), "modules.kinds[{again}]"),
        ("modules.named", ("",), "modules.named"),
        ("modules.named", ("x",) * 5, "modules.named"),
        ("modules.named", ("",) * 5, "modules.kinds[{root}].children"),
        ("objects", (ObjectSpec(99, Step("attribute", VStr("x")), "t"),), "objects[0].parent"),
        ("objects", (ObjectSpec(0, Step("attribute", VStr("x")), "t", 7),), "objects[0].attributes"),
        ("edits", (Edit(99, Step("attribute", VStr("x")), VInt(1)),), "edits[0].target"),
        ("edits", (Edit(0, Step("attribute", VStr("x")), VTensor(99)),), "edits[0].value"),
        ("edits", (Edit(0, Step("attribute", VStr("x")), VTuple((VTensor(-1),))),), "edits[0].value"),
        ("edits", (Edit(0, Step("attribute", VStr("x")), VObject(99)),), "edits[0].value"),
        ("edits", (Edit(0, Step("attribute", VStr("x")), VTupleLike(99, ())),), "edits[0].value"),
        ("class_edits", (ClassEdit("m:C", "x", VTensor(99), None),), "class_edits[0].before"),
        ("class_edits", (ClassEdit("m:C", "x", None, VList((VTensor(-1),))),), "class_edits[0].after"),
    ],
    ids=str,
)
def test_every_number_is_checked(publication: Publication, path: str, value: Any, named: str) -> None:  # F12
    if value == (A_PARAMETERS,):
        value = (publication.manifest().tensors.storage[0],)
    manifest = put(publication.manifest(), place_of(publication, path), value)
    with pytest.raises(ManifestError) as caught:
        check(publication, manifest)
    prefix, _, rest = ("$." + place_of(publication, named)).partition("?")
    assert caught.value.path.startswith(prefix)
    assert caught.value.path.endswith(rest)
    assert caught.value.path == prefix or rest


@pytest.mark.parametrize("inner", [VTensor(99), VTensor(-1), VObject(99), VObject(-1), VTupleLike(99, ())], ids=repr)
@pytest.mark.parametrize(
    "around",
    [
        lambda inner: VTuple((VInt(1), inner)),
        lambda inner: VDeque((inner,), None),
        lambda inner: VDict(((VStr("a"), inner),)),
        lambda inner: VDict(((inner, VInt(1)),)),
        lambda inner: VSlice(VNull(), inner, VNull()),
        lambda inner: VSlice(VInt(1), VInt(2), VList((inner,))),
        lambda inner: VWeakref(inner),
        lambda inner: VTupleLike(0, (inner,)),
    ],
    ids=["tuple", "deque", "dict value", "dict key", "slice", "step of a slice", "weak reference", "tuple like"],
)
def test_a_number_inside_of_a_value_is_checked(publication: Publication, around: Any, inner: Any) -> None:
    edit = Edit(0, Step("attribute", VStr("x")), VList((VFloat(1.0), around(inner))))
    with pytest.raises(ManifestError) as caught:
        check(publication, put(publication.manifest(), "edits", (edit,)))
    assert caught.value.path == "$.edits[0].value"


def test_a_tree_in_which_a_module_comes_before_the_one_it_lies_in(publication: Publication) -> None:
    modules = publication.manifest().modules
    turned = msgspec.structs.replace(modules, kind=modules.kind[::-1])
    with pytest.raises(ManifestError) as caught:
        check(publication, put(publication.manifest(), "modules", turned))
    assert caught.value.path.startswith("$.modules.kind")


# ---- bytes that are no manifest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xc1", bytes(range(64)), b"\x9d" * 100], ids=["empty", "nil", "c1", "bytes", "deep"]
)
def test_malformed_bytes(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(data)


Ext = msgspec.msgpack.Ext


@pytest.mark.parametrize("value", [1.5, "1", True, None, 1, [0, 0], b"\x00" * 8, datetime(2026, 1, 1, tzinfo=UTC)], ids=str)
def test_a_column_holds_integers_only(publication: Publication, value: Any) -> None:
    raw = msgspec.msgpack.decode(publication.data)
    assert isinstance(raw[7][1], Ext)
    raw[7][1] = value
    with pytest.raises(ManifestError, match=r"\[7\]\[1\]"):
        decode_manifest(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(("code", "nbytes"), [(0, 0), (0, 8), (3, 6), (16, 16), (127, 127), (2, 7), (4, 6), (8, 20)])
def test_a_column_is_whole_integers_of_a_size_that_there_is(publication: Publication, code: int, nbytes: int) -> None:
    raw = msgspec.msgpack.decode(publication.data)
    raw[7][1] = Ext(code, b"\x00" * nbytes)
    with pytest.raises(ManifestError, match=rf"{nbytes} bytes are no whole|integers of {code} bytes"):
        decode_manifest(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("code", [1, 2, 4, 8])
def test_nothing_else_is_a_column(publication: Publication, code: int) -> None:
    raw = msgspec.msgpack.decode(publication.data)
    raw[1] = Ext(code, b"\x00" * 8)
    with pytest.raises(ManifestError, match=r"\[1\]"):
        decode_manifest(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("code", [0, 1, 8, 127])
@pytest.mark.parametrize("header", [b"\xc9\xff\xff\xff\xff", b"\xc9\x7f\xff\xff\xff", b"\xc9\x01\x00\x00\x00", b"\xc8\xff\xff"])
def test_a_length_takes_no_memory_before_its_bytes_are_there(publication: Publication, header: bytes, code: int) -> None:
    column = publication.manifest().storages.offset
    packed = msgspec.msgpack.encode(Ext(column.view.itemsize, bytes(column.view)))
    before, after = publication.data.split(packed, 1)
    refused_at_once(before + header + bytes([code]) + after)


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xdd\x01\x00\x00\x00", b"\xdc\xff\xff"])
def test_a_count_takes_no_memory_before_its_items_are_there(publication: Publication, header: bytes) -> None:
    segments = msgspec.msgpack.encode(publication.manifest().segments)
    before, after = publication.data.split(segments, 1)
    refused_at_once(before + header + segments[1:] + after)


def refused_at_once(data: bytes) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ManifestError):
        decode_manifest(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 64 << 10  # KiB


def test_cut_off_anywhere(publication: Publication) -> None:
    for nbytes in range(len(publication.data)):
        with pytest.raises(ManifestError):
            decode_manifest(publication.data[:nbytes])


def test_another_version_is_refused(publication: Publication) -> None:
    with pytest.raises(ManifestError, match="version 99"):
        decode_manifest(encode_manifest(put(publication.manifest(), "version", 99)))


def test_paths_that_would_fill_memory() -> None:
    """Each level but the last is one kind of module, whose one child has a long name: a few bytes for much."""
    levels, name = 3000, "n" * 1000
    specs = [ModuleSpec("", "m:Link", True), ModuleSpec(name, "m:Last", True)]
    modules = pack_modules(specs)
    deep = msgspec.structs.replace(modules, kind=Column([0] * levels + [1]))
    with pytest.raises(ManifestError, match="paths are longer"):
        deep.paths()


# ---- into the tables and out again -------------------------------------------------------------------------------------------

numbers = st.integers(0, 5)
values = st.one_of(numbers.map(VInt), st.booleans().map(VBool), st.sampled_from([0.0, -0.0, 1.0]).map(VFloat))
attributes = st.dictionaries(st.sampled_from("ab"), values).map(lambda found: tuple(found.items()))
storages = st.builds(StorageSpec, segment=numbers, offset=numbers, nbytes=numbers, shared=st.booleans())
kinds = st.builds(
    TensorKind,
    dtype=st.sampled_from(["float32", "int8"]),
    shape=st.tuples(numbers),
    stride=st.tuples(numbers),
    cls=st.sampled_from(["", "Parameter"]),
    requires_grad=st.booleans(),
    attributes=attributes,
)
tensors = st.builds(TensorSpec, kind=kinds, storage=st.integers(-2, 5), offset=numbers)
modules = st.builds(
    ModuleSpec,
    path=st.lists(st.sampled_from("xy"), max_size=3).map(".".join),
    cls=st.sampled_from(["m:A", "m:B"]),
    training=st.booleans(),
    parameters=st.dictionaries(st.sampled_from("pq"), st.integers(-1, 5)).map(lambda found: tuple(found.items())),
    buffers=st.dictionaries(st.sampled_from("bc"), st.integers(-1, 5)).map(
        lambda found: tuple((name, name == "b", index) for name, index in found.items())
    ),
    attributes=attributes,
)


def encoded(items: Any) -> bytes:
    """1 is not True and 0.0 is not -0.0."""
    return msgspec.msgpack.encode(list(items))


@given(st.lists(storages, max_size=5), st.lists(tensors, max_size=5), st.lists(modules, max_size=5))
def test_tables_give_back_what_went_into_them(
    in_storages: list[StorageSpec], in_tensors: list[TensorSpec], in_modules: list[ModuleSpec]
) -> None:
    assert encoded(pack_storages(in_storages)) == encoded(in_storages)
    assert encoded(pack_tensors(in_tensors)) == encoded(in_tensors)
    assert encoded(pack_modules([ModuleSpec("", "m:Root", True), *in_modules])) == encoded(
        [ModuleSpec("", "m:Root", True), *in_modules]
    )
    packed = pack_storages(in_storages)
    assert [packed[i] for i in range(len(packed))] == in_storages
    table = pack_tensors(in_tensors)
    assert [table[i] for i in range(len(table))] == in_tensors


integers = st.one_of(*(st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)))


@given(st.lists(integers))
def test_a_column_stands_for_its_values(items: list[int]) -> None:
    column = Column(items)
    packed = msgspec.msgpack.encode(pack_column(column))
    found = msgspec.msgpack.decode(packed, type=Column, ext_hook=unpack_column)
    for either in (column, found):
        assert list(either) == items
        assert [either[i] for i in range(len(either))] == items
        assert list(either[1:-1]) == items[1:-1]
        assert [value for part in either.parts() for value in part] == items
        assert either == Column(items) == pickle.loads(pickle.dumps(either)) == copy.deepcopy(either)
        assert hash(either) == hash(Column(items))
    least = next(n for n in (1, 2, 4, 8) if all(-(1 << 8 * n - 1) <= value < 1 << 8 * n - 1 for value in items))
    assert column.view.nbytes == least * len(items)
    assert Column([*items, 1]) != column
    assert column != items


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, 1 << 200])
def test_an_integer_that_no_column_can_hold(value: int) -> None:
    with pytest.raises(OverflowError):
        Column([0, value])


@pytest.mark.parametrize("column", ["segment", "offset", "nbytes"])
@pytest.mark.parametrize("at", [0, 999, 1000, 2500])
def test_a_wrong_number_is_named_wherever_it_is(publication: Publication, column: str, at: int) -> None:
    def manifest(**changed: int) -> Manifest:
        specs = [{"segment": 0, "offset": 64 * i, "nbytes": 64} for i in range(2501)]
        specs[at].update(changed)
        storages = pack_storages([StorageSpec(**spec, shared=True) for spec in specs])
        return msgspec.structs.replace(publication.manifest(), segments=(64 * 2501,), addresses=(), storages=storages)

    validate(manifest(), [64 * 2501])
    with pytest.raises(ManifestError) as caught:
        validate(manifest(**{column: BIG - 63}), [64 * 2501])
    assert caught.value.path == f"$.storages.{'segment' if column == 'segment' else 'offset'}[{at}]"


def test_layers_that_are_alike_are_said_once() -> None:
    def build(layers: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(layers)))

    few, many = (Publication(capture_loaded(build(n).eval(), lambda n=n: build(n))) for n in (4, 40))
    assert len(few.manifest().modules.kinds) == 4  # the outermost has its own number of children
    assert len(many.manifest().modules.kinds) == 4
    assert len(many.manifest().tensors.kinds) == len(few.manifest().tensors.kinds) == 2
    assert (len(many.data) - len(few.data)) / (36 * 4) < 20  # bytes a tensor
