"""A rebind is complete or refused; nothing in a manifest is believed before it is checked."""

from __future__ import annotations

import gc
import os
import types
from typing import Any

import msgspec
import pytest
import torch
from support.roundtrip import CPU, Publication, build_meta, capture_loaded
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.config import Access
from torchwcache.encoding import VInt, VObject, VStr, VTensor, VTuple
from torchwcache.errors import ManifestError, RebindError, SegmentError
from torchwcache.manifest import Edit, Manifest, ObjectSpec, Step, decode_manifest, encode_manifest, validate
from torchwcache.module.reachability import find_meta_tensors
from torchwcache.module.rebind import rebind


class Net(nn.Module):
    def __init__(self, width: int = 4, *, extra: bool = False, attention: str = "eager") -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.attention = attention
        self.views = [self.lin.weight]
        self.register_buffer("seen", torch.zeros(3))
        if extra:
            self.extra = nn.Linear(1, 1)


@pytest.fixture
def publication() -> Publication:
    return Publication(capture_loaded(Net().eval(), Net))


def rebind_to(publication: Publication, module: nn.Module, manifest: Manifest | None = None) -> None:
    rebind(module, manifest or publication.manifest(), publication.map(), device=CPU)


def problems(caught: pytest.ExceptionInfo[RebindError]) -> dict[str, str]:
    return dict(caught.value.problems)


# ---- is it the same module? --------------------------------------------------------------------------------------------------


def test_a_tree_that_differs(publication: Publication) -> None:
    with pytest.raises(RebindError, match="extra") as caught:
        rebind_to(publication, build_meta(lambda: Net(extra=True)))
    assert "extra" in problems(caught)


def test_a_class_that_differs(publication: Publication) -> None:
    module = build_meta(Net)
    module.norm = nn.Identity()
    with pytest.raises(RebindError) as caught:
        rebind_to(publication, module)
    assert "torch.nn.modules.linear:Identity" in problems(caught)["norm"]


def test_a_module_shared_in_one_only() -> None:
    def shared() -> nn.Module:
        block = nn.Linear(2, 2)
        return nn.ModuleList([block, block])

    publication = Publication(capture_loaded(shared().eval(), shared))
    attached, _ = publication.attach(shared)
    assert attached[0] is attached[1]
    with pytest.raises(RebindError, match="shares its module"):
        rebind_to(publication, build_meta(lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])))


@pytest.mark.parametrize(("mine", "shown"), [("flash", "'flash'"), (None, "None"), (7, "7"), ((1, 2), "(1, 2)")])
def test_a_value_that_the_build_resolves_otherwise(publication: Publication, mine: Any, shown: str) -> None:  # F2, D11
    with pytest.raises(RebindError) as caught:
        rebind_to(publication, build_meta(lambda: Net(attention=mine)))
    assert problems(caught)["attention"] == f"is {shown} here, 'eager' in the entry"


def test_true_is_not_one_and_a_missing_attribute_is_missing() -> None:
    def build(flag: Any = 1) -> nn.Module:
        module = nn.Linear(2, 2)
        module.flag = flag
        return module

    publication = Publication(capture_loaded(build().eval(), build))
    with pytest.raises(RebindError, match="flag: is True here, 1 in the entry"):
        rebind_to(publication, build_meta(lambda: build(True)))
    module = build_meta(build)
    del module.flag
    with pytest.raises(RebindError, match="flag: is missing here"):
        rebind_to(publication, module)


def test_an_object_that_the_build_does_not_make() -> None:
    def build(there: bool = True) -> nn.Module:
        module = nn.Module()
        module.inner = types.SimpleNamespace(items=[torch.zeros(1)]) if there else 5
        return module

    publication = Publication(capture_loaded(build().eval(), build))
    with pytest.raises(RebindError, match="is a builtins:int here"):
        rebind_to(publication, build_meta(lambda: build(there=False)))


# ---- completeness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hide", ["attribute", "list", "closure", "default", "iterator", "class instance", "dict key", "generator"])
def test_a_meta_tensor_left_anywhere_is_found(hide: str) -> None:  # rule 4
    meta = torch.empty(1, device="meta")
    module = nn.Linear(2, 2)
    module.keep = {  # type: ignore[assignment]
        "attribute": lambda: meta,
        "list": lambda: [[{"x": meta}]],
        "closure": lambda: lambda: meta,
        "default": lambda: lambda x=meta: x,
        "iterator": lambda: iter([meta]),  # nothing that Python code could list
        "class instance": lambda: types.SimpleNamespace(a=types.SimpleNamespace(b=meta)),
        "dict key": lambda: {meta: 1},
        "generator": lambda: (x for x in [meta]),
    }[hide]()
    assert find_meta_tensors(module)
    module.keep = None
    assert not find_meta_tensors(module)


def test_a_rebind_that_leaves_a_tensor_on_meta_is_refused(publication: Publication) -> None:  # F7
    module = build_meta(Net)
    module.forgotten = iter([torch.empty(1, device="meta")])
    with pytest.raises(RebindError, match="still on the meta device"):
        rebind_to(publication, module)


def test_collection_is_left_as_it_was(publication: Publication) -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            rebind_to(publication, build_meta(Net))
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_writes_stay_in_the_client_and_readonly_maps(publication: Publication) -> None:  # F21
    one, _ = publication.attach(Net)
    two, _ = publication.attach(Net)
    with torch.no_grad():
        one.lin.weight.add_(1)
    assert not torch.equal(one.lin.weight, two.lin.weight)
    three, _ = publication.attach(Net, access=Access.READONLY)
    assert torch.equal(three.lin.weight, two.lin.weight)


# ---- the manifest is not believed ---------------------------------------------------------------------------------------------


def changed(publication: Publication, **fields: Any) -> Manifest:
    manifest = msgspec.structs.replace(publication.manifest(), **fields)
    return decode_manifest(encode_manifest(manifest))


def check(publication: Publication, manifest: Manifest) -> None:
    validate(manifest, [publication.memory.size_of(fd) for fd in publication.fds])


def _first(items: tuple[Any, ...], **fields: Any) -> tuple[Any, ...]:
    return (msgspec.structs.replace(items[0], **fields), *items[1:])


@pytest.mark.parametrize(
    ("table", "fields", "path"),
    [
        ("storages", {"segment": 9}, "$.storages[0].segment"),
        ("storages", {"segment": -1}, "$.storages[0].segment"),
        ("storages", {"offset": 2**40}, "$.storages[0]"),
        ("storages", {"offset": -64}, "$.storages[0]"),
        ("storages", {"nbytes": 2**40}, "$.storages[0]"),
        ("storages", {"nbytes": 0}, "$.storages[0]"),
        ("tensors", {"storage": 99}, "$.tensors[0].storage"),
        ("tensors", {"storage": -1}, "$.tensors[0].storage"),
        ("tensors", {"storage": -2}, "$.tensors[0].storage"),
        ("tensors", {"dtype": "float31"}, "$.tensors[0].dtype"),
        ("tensors", {"dtype": "float64"}, "$.tensors[0]"),
        ("tensors", {"shape": (4, 5)}, "$.tensors[0]"),
        ("tensors", {"shape": (-4, -4)}, "$.tensors[0]"),
        ("tensors", {"shape": (4,)}, "$.tensors[0].stride"),
        ("tensors", {"stride": (4, -1)}, "$.tensors[0]"),
        ("tensors", {"stride": (2**61, 2**61)}, "$.tensors[0]"),
        ("tensors", {"offset": 1}, "$.tensors[0]"),
        ("tensors", {"offset": -1}, "$.tensors[0]"),
        ("modules", {"same_as": 3}, "$.modules[0].same_as"),
        ("modules", {"attributes": 99}, "$.modules[0].attributes"),
        ("modules", {"path": "x"}, "$.modules"),
        ("modules", {"parameters": (("w", 99),)}, "$.modules[0]"),
        ("modules", {"buffers": (("b", -2, True),)}, "$.modules[0]"),
    ],
    ids=str,
)
def test_every_index_and_offset_is_checked(publication: Publication, table: str, fields: dict[str, Any], path: str) -> None:  # F12
    items = getattr(publication.manifest(), table)
    if table == "tensors":  # a matrix first
        items = tuple(sorted(items, key=lambda spec: -len(spec.shape)))
    manifest = changed(publication, **{table: _first(items, **fields)})
    with pytest.raises(ManifestError) as caught:
        check(publication, manifest)
    assert caught.value.path == path


@pytest.mark.parametrize(
    "edit",
    [
        Edit(99, Step("attribute", VStr("x")), VInt(1)),
        Edit(0, Step("attribute", VStr("x")), VTensor(99)),
        Edit(0, Step("attribute", VStr("x")), VTuple((VTensor(-1),))),
        Edit(0, Step("attribute", VStr("x")), VObject(99)),
    ],
)
def test_edits_are_checked(publication: Publication, edit: Edit) -> None:
    with pytest.raises(ManifestError):
        check(publication, changed(publication, edits=(edit,)))
    with pytest.raises(ManifestError):
        check(publication, changed(publication, objects=(ObjectSpec(99, Step("attribute", VStr("x")), "t"),)))


def test_segments_must_have_the_declared_sizes(publication: Publication) -> None:
    with pytest.raises(ManifestError, match="file descriptors"):
        validate(publication.manifest(), [1])
    with pytest.raises(ManifestError, match="file descriptors"):
        validate(publication.manifest(), [])


def test_an_unsealed_or_foreign_descriptor_is_not_mapped(publication: Publication, tmp_path: Any) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(SegmentError):
            publication.memory.map(fd, 4096)
    finally:
        os.close(fd)
    path = tmp_path / "plain"
    path.write_bytes(bytes(4096))
    with open(path, "rb") as file, pytest.raises(SegmentError):
        publication.memory.map(file.fileno(), 4096)


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xc1", bytes(range(64)), b"\x9d" * 100], ids=["empty", "nil", "c1", "bytes", "deep"]
)
def test_malformed_bytes(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(data)


def test_another_version_is_refused(publication: Publication) -> None:
    with pytest.raises(ManifestError, match="version 99"):
        changed(publication, version=99)


def test_an_enum_or_class_that_is_not_loaded_is_not_imported(publication: Publication) -> None:
    import sys

    from torchwcache.encoding import VEnum

    assert "turtle" not in sys.modules
    edit = Edit(0, Step("attribute", VStr("x")), VEnum("turtle:Turtle", "RED"))
    with pytest.raises(RebindError, match="does not exist in this process"):
        rebind_to(publication, build_meta(Net), changed(publication, edits=(edit,)))
    tensors = _first(publication.manifest().tensors, cls="turtle:Turtle")
    with pytest.raises(RebindError, match="does not exist in this process"):
        rebind_to(publication, build_meta(Net), changed(publication, tensors=tensors))
    tensors = _first(publication.manifest().tensors, cls="os:system")
    with pytest.raises(RebindError, match="does not exist in this process"):
        rebind_to(publication, build_meta(Net), changed(publication, tensors=tensors))
    assert "turtle" not in sys.modules


def test_a_value_inside_an_object_that_the_build_resolves_otherwise() -> None:  # F2, D11
    class Config:
        def __init__(self, attention: str) -> None:
            self.attention, self.path = attention, attention

    def build(attention: str = "eager") -> nn.Module:
        module = nn.Linear(2, 2)
        module.config = Config(attention)
        return module

    rules = CaptureRules(ignore={"config.path": "differs by process"})
    publication = Publication(capture_loaded(build().eval(), build, rules))
    publication.attach(build)
    with pytest.raises(RebindError) as caught:
        rebind_to(publication, build_meta(lambda: build("flash")))
    assert problems(caught) == {"config.attention": "is 'flash' here, 'eager' in the entry"}
