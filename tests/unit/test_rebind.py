"""A rebind is complete or refused."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import pytest
import torch
from support.roundtrip import CPU, Publication, build_meta, capture_loaded, mapped_segments
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.config import Access
from torchwcache.encoding import VDict, VInt, VObject, VStr, VTuple
from torchwcache.errors import RebindError, SegmentError
from torchwcache.manifest import Edit, Manifest, ObjectSpec, Step, decode_manifest, encode_manifest
from torchwcache.memory.host import HostMemory
from torchwcache.module import rebind as rebinding
from torchwcache.module.capture import capture
from torchwcache.module.detach import detach_mapped
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


@pytest.mark.parametrize("mine", [(True, 2), (1.0, 2), (1, 2, 3), [1, 2], (1, torch.zeros(2, device="meta")), (), (1, (2,))])
def test_a_tuple_is_equal_when_its_items_are_of_the_same_types(mine: Any) -> None:
    def build(size: Any = (1, 2)) -> nn.Module:
        module = nn.Linear(2, 2)
        module.size = size
        return module

    publication = Publication(capture_loaded(build().eval(), build))
    rebind_to(publication, build_meta(lambda: build(tuple(json.loads("[1, 2]")))))
    with pytest.raises(RebindError, match="size: is "):
        rebind_to(publication, build_meta(lambda: build(mine)))


def test_a_value_that_only_torch_can_read_may_not_be_missing() -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        module.kind = torch.float16
        return module

    publication = Publication(capture_loaded(build().eval(), build))
    publication.attach(build)
    for kind, shown in ((torch.float32, "is torch.float32 here"), (None, "is missing here")):
        module = build_meta(build)
        module.kind = kind
        if kind is None:
            del module.kind
        with pytest.raises(RebindError, match=shown):
            rebind_to(publication, module)


class Layer(nn.Module):
    """One of many: alike but for its number, an optional part, and what it computes in."""

    def __init__(self, number: Any, part: str | None = None, kind: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.number, self.kind, self.scale = number, kind, float("nan")
        self.linear = nn.Linear(2, 2)
        self.register_module("gone", None)
        if part:
            self.register_module(part, nn.Linear(2, 2))


def layers(*items: tuple[Any, ...]) -> nn.Module:
    return nn.Sequential(*(Layer(*item) for item in items))


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ([(0,), (7,), (2,)], {"1.number": "is 7 here, 1 in the entry"}),
        ([(0,), (True,), (2,)], {"1.number": "is True here, 1 in the entry"}),
        ([(0,), (1.0,), ("2",)], {"1.number": "is 1.0 here, 1 in the entry", "2.number": "is '2' here, 2 in the entry"}),
        ([(0,), (1, None, torch.float32), (2,)], {"1.kind": "is torch.float32 here"}),
        ([(0,), (1, "more"), (2,)], {"1.more": "is built here, but not in the entry"}),
        ([(0,), (1,)], {f"2{rest}": "is in the entry, but not built here" for rest in ("", ".linear")}),
    ],
)
def test_what_differs_in_one_of_many_layers_is_named(mine: list[tuple[Any, ...]], expected: dict[str, str]) -> None:
    def build() -> nn.Module:
        return layers((0,), (1,), (2,))

    publication = Publication(capture_loaded(build().eval(), build))
    publication.attach(build)
    with pytest.raises(RebindError) as caught:
        rebind_to(publication, build_meta(lambda: layers(*mine)))
    found = problems(caught)
    assert found.keys() == expected.keys()
    assert all(found[path].startswith(reason) for path, reason in expected.items())


def test_two_layers_that_swapped_names() -> None:
    def build(*parts: str) -> nn.Module:
        return layers((0, parts[0]), (0, parts[1]))

    publication = Publication(capture_loaded(build("a", "b").eval(), lambda: build("a", "b")))
    with pytest.raises(RebindError) as caught:
        rebind_to(publication, build_meta(lambda: build("b", "a")))
    assert problems(caught).keys() == {"0.a", "0.b", "1.a", "1.b"}


def test_a_table_that_the_build_fills_otherwise_becomes_that_of_the_entry() -> None:
    def build() -> nn.Module:
        return nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    loaded = build().eval()
    loaded[1].register_buffer("kept", torch.ones(2))
    loaded[1].register_buffer("passing", torch.ones(1), persistent=False)
    loaded[2].bias = None
    publication = Publication(capture_loaded(loaded, build))
    module = build_meta(build)
    module[0].register_parameter("more", nn.Parameter(torch.empty(1, device="meta")))
    module[0].register_buffer("most", torch.empty(1, device="meta"), persistent=False)
    rebind_to(publication, module)
    assert [list(layer._parameters) for layer in module] == [["weight", "bias"]] * 3
    assert module[2].bias is None
    assert [list(layer.state_dict()) for layer in module] == [["weight", "bias"], ["weight", "bias", "kept"], ["weight"]]
    assert [layer._non_persistent_buffers_set for layer in module] == [set(), {"passing"}, set()]
    assert not module[0]._buffers


class Renaming(nn.ModuleList):
    """Names its modules in its own way."""

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        for path, module in super().named_modules(memo, prefix, remove_duplicate):
            yield path.replace("0", "zero"), module


def test_a_class_that_names_its_modules_itself() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Renaming([nn.Linear(2, 2)]))

    publication = Publication(capture_loaded(build().eval(), build))
    assert publication.manifest().modules.paths() == ["", "0", "1", "1.zero"]
    attached, _ = publication.attach(build)
    assert torch.equal(attached[1][0].weight, attached.get_submodule("1.0").weight)


# ---- what is made --------------------------------------------------------------------------------------------------------------


class _Refusing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen by a mode of the caller's")


@contextmanager
def _default_device() -> Iterator[None]:
    with torch.device("meta"):
        yield


class Mixed(nn.Module):
    """A matrix, a vector, a scalar, nothing, two over one storage, integers, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 4))
        self.vector = nn.Parameter(torch.randn(5))
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(4), requires_grad=False)
        both = torch.randn(6)
        self.first, self.second = nn.Parameter(both[:2]), nn.Parameter(both[2:].view(2, 2))
        self.register_buffer("table", torch.randn(2, 2))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad, _default_device, _Refusing])
def test_tensors_are_the_same_whatever_mode_the_caller_is_in(mode: Any, requires_grad: bool) -> None:
    torch.manual_seed(0)
    loaded = Mixed().eval()
    publication = Publication(capture_loaded(loaded, Mixed))
    module, segments = build_meta(Mixed), publication.map()
    manifest = publication.manifest()
    inference = torch.is_inference_mode_enabled()
    with mode():
        rebind(module, manifest, segments, device=CPU, requires_grad=requires_grad)
    assert torch.is_inference_mode_enabled() is inference
    storages: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters():
        theirs = loaded.get_parameter(name)
        assert type(parameter) is nn.Parameter
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad is (requires_grad and theirs.requires_grad)
        assert not parameter.is_inference()
        assert not parameter._is_view()
        assert parameter.is_leaf
        assert parameter.device == CPU
        assert torch.equal(parameter, theirs)
        assert parameter.stride() == theirs.stride()
        storages.setdefault(parameter.untyped_storage()._cdata, set()).add(name)
    assert {frozenset(names) for names in storages.values() if len(names) > 1} == {frozenset({"first", "second"})}
    assert not module.table.is_inference()
    assert type(module.table) is torch.Tensor
    with torch.no_grad():
        module.vector.add_(1)  # what was made in inference mode could not be changed outside of it
    if requires_grad:
        (module.matrix.sum() + module.turned.sum()).backward()
        assert module.matrix.grad is not None


def test_each_tensor_owns_its_storage_and_no_more() -> None:
    publication = Publication(capture_loaded(Mixed().eval(), Mixed))
    attached, _ = publication.attach(Mixed)
    assert attached.matrix.untyped_storage().nbytes() == 48
    assert attached.vector.untyped_storage().nbytes() == 20
    assert attached.second.untyped_storage().nbytes() == 24
    assert attached.second.storage_offset() == 2
    copy = nn.Parameter(attached.matrix.detach().clone())
    assert torch.equal(copy, attached.matrix)


class Part(nn.Module):
    """One of three kinds of module that take turns; some tensors are those of an early part, some lie in memory of several."""

    def __init__(self, number: int, first: Part | None) -> None:
        super().__init__()
        self.weight = first.weight if first is not None and number % 7 == 0 else nn.Parameter(torch.randn(8, 16))
        if number % 3 == 0:
            self.register_parameter("bias", nn.Parameter(torch.randn(16)) if number % 2 else None)
        elif number % 3 == 1:
            self.inner = nn.ModuleDict({"norm": nn.LayerNorm(4), "none": nn.Identity()})
            self.register_buffer("seen", torch.randn(3), persistent=number % 2 == 0)
        else:
            both = torch.randn(20)
            self.left, self.right = nn.Parameter(both[:9]), nn.Parameter(both[9:])


class Parts(nn.Module):
    def __init__(self, count: int = 700) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for number in range(count):
            self.parts.append(Part(number, self.parts[0] if number else None))  # type: ignore[arg-type]


def test_a_model_of_very_many_parts_of_several_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """More modules and tensors than are worked on at a time, their memory in many segments and in no order."""
    monkeypatch.setattr(HostMemory, "segment_nbytes", lambda *_: 1 << 14)
    loaded = Parts().eval()
    for number, part in enumerate(loaded.parts):
        if number % 5 == 1:
            part.weight.row_names = ["a", number % 2]  # type: ignore[union-attr]
    publication = Publication(capture_loaded(loaded, Parts))
    assert len(publication.manifest().segments) > 10
    attached, _ = publication.attach(Parts)
    mine, theirs = ([*m.named_parameters(remove_duplicate=False), *m.named_buffers()] for m in (attached, loaded))
    assert [name for name, _ in mine] == [name for name, _ in theirs]
    assert all(torch.equal(a, b) and type(a) is type(b) for (_, a), (_, b) in zip(mine, theirs, strict=True))
    assert attached.state_dict().keys() == loaded.state_dict().keys()
    weights = [part.weight for part in attached.parts]
    assert all((weight is weights[0]) is (number % 7 == 0) for number, weight in enumerate(weights))
    assert all(part._parameters["bias"] is None for part in attached.parts[0::6])
    named = [getattr(weight, "row_names", None) for weight in weights]
    assert named == [getattr(part.weight, "row_names", None) for part in loaded.parts]
    shared = [part.left.untyped_storage()._cdata == part.right.untyped_storage()._cdata for part in attached.parts[2::3]]
    assert shared == [True] * len(shared)


class Alike(nn.Module):
    """All of them are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 1


def test_modules_that_are_equal_are_several() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"a": Alike(), "b": Alike(), "c": nn.Linear(1, 1)})

    def shared() -> nn.Module:
        one = Alike()
        return nn.ModuleDict({"a": one, "b": one, "c": nn.Linear(1, 1)})

    loaded = build().eval()
    publication = Publication(capture_loaded(loaded, build))
    attached, _ = publication.attach(build)
    assert torch.equal(attached["a"].weight, loaded["a"].weight)
    assert torch.equal(attached["b"].weight, loaded["b"].weight)
    with pytest.raises(RebindError, match="shares its module"):
        rebind_to(publication, build_meta(shared))


def test_memory_that_runs_out_for_a_copy_leaves_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not the module's own, and is changed by the load, is as it was when no copy of a buffer can be made."""
    registry: dict[str, Any] = {"seen": []}

    def build() -> nn.Module:
        module = nn.BatchNorm1d(4)
        module.registry = registry  # type: ignore[assignment]
        return module

    loaded = build().eval()
    built = build_meta(build)
    registry_then = {"seen": ["loaded"]}
    loaded.registry = registry_then  # type: ignore[assignment]
    publication = Publication(capture(loaded, built, device=CPU))
    module, segments = build_meta(build), publication.map()

    def no_memory(*_: Any) -> torch.Tensor:
        raise MemoryError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(type(segments[0]), "tensor", no_memory)
        with pytest.raises(MemoryError, match="no copy"):
            rebind(module, publication.manifest(), segments, device=CPU)
    assert registry == {"seen": []}
    rebind(build_meta(build), publication.manifest(), segments, device=CPU)
    assert registry == {"seen": ["loaded"]}, "this load changes what others hold"


def test_tables_come_in_the_order_of_the_entry_under_the_keys_of_the_build(publication: Publication) -> None:
    module = build_meta(Net)
    weight = module.lin._parameters.pop("weight")
    module.lin._parameters["weight"] = weight
    keys = {key: key for key in module.norm._parameters}
    rebind_to(publication, module)
    assert list(module.lin._parameters) == ["weight", "bias"]
    assert all(key is keys[key] for key in module.norm._parameters)


def test_a_tensor_shares_an_attribute_with_what_the_load_added() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    loaded = build().eval()
    loaded.names = loaded[0].weight.names_of_rows = ["a", "b"]
    loaded[1].weight.other = loaded[0].weight
    publication = Publication(capture_loaded(loaded, build))
    attached, _ = publication.attach(build)
    assert attached.names == ["a", "b"]
    assert attached.names is attached[0].weight.names_of_rows
    assert attached[1].weight.other is attached[0].weight


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


class Partly(nn.Module):
    """Names only some of what lies inside of it, or one of them twice."""

    twice = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        start = f"{prefix}." if prefix else ""
        yield prefix, self
        yield start + "a", self.a
        if self.twice:
            yield start + "b", self.a


class Twice(Partly):
    twice = True


@pytest.mark.parametrize("build", [Partly, Twice, lambda: nn.Sequential(Partly(), nn.Linear(1, 1))])
def test_a_module_inside_that_its_parent_does_not_name(build: Any) -> None:
    with pytest.raises(RebindError, match=r"b\.weight: is still on the meta device"):
        Publication(capture_loaded(build().eval(), build)).attach(build)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("attribute", [None, "bound method"])
def test_nothing_but_the_tensors_keeps_the_memory(attribute: str | None, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When they are gone it is unmapped, also before a garbage collection."""

    def build() -> nn.Module:
        module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        for parameter in module.parameters() if attribute else ():
            parameter.weight_loader = module[0].forward  # type: ignore[attr-defined]
        return module

    publication = Publication(capture_loaded(build().eval(), build))
    module, manifest = build_meta(build), publication.manifest()
    if fails:
        module.hidden = [torch.empty(1, device="meta")]  # type: ignore[assignment]
    gc.collect()
    monkeypatch.setattr(rebinding, "_made_old", True)
    gc.disable()
    try:
        before = mapped_segments()
        segments = publication.map()
        assert mapped_segments() > before
        with pytest.raises(RebindError) if fails else nullcontext() as caught:
            rebind(module, manifest, segments, device=CPU)
        if caught is not None:
            traceback.clear_frames(caught.tb)
        detach_mapped(module, segments)
        segments.clear()
        assert mapped_segments() == before
    finally:
        gc.enable()


def test_no_edit_decides_what_lies_in_a_table(publication: Publication) -> None:
    manifest = publication.manifest()
    paths = manifest.modules.paths()
    lin, start = paths.index("lin"), len(paths) + len(manifest.objects)
    objects = (
        *manifest.objects,
        ObjectSpec(lin, Step("attribute", VStr("_parameters")), "builtins:dict"),
        ObjectSpec(start, Step("key", VStr("weight")), "torch.nn.parameter:Parameter"),
        ObjectSpec(lin, Step("attribute", VStr("_buffers")), "builtins:dict"),
    )
    on_meta = VObject(start + 1)
    edits = (
        Edit(start + 2, Step("key", VStr("hidden")), on_meta),
        Edit(0, Step("attribute", VStr("_buffers")), VDict(((VStr("seen"), on_meta),))),
    )
    module = build_meta(Net)
    rebind_to(publication, module, changed(publication, objects=objects, edits=(*manifest.edits, *edits)))
    assert not find_meta_tensors(module)
    assert not module.lin._buffers
    assert torch.equal(module.seen, torch.zeros(3))

    edits = (Edit(0, Step("attribute", VStr("kept")), VTuple((on_meta,))),)
    refused = changed(publication, objects=objects, edits=(*manifest.edits, *edits))
    with pytest.raises(RebindError, match="still on the meta device"):
        rebind_to(publication, build_meta(Net), refused)


@pytest.mark.parametrize("in_place", [False, True])
def test_no_edit_hides_a_module_that_was_not_filled(in_place: bool) -> None:
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module.__dict__["apart"] = (nn.Linear(2, 2, device="meta"),)  # a tuple of a module that is not of the tree
        return module

    loaded = build().eval()
    loaded.__dict__["apart"] = (nn.Linear(2, 2),)
    publication = Publication(capture_loaded(loaded, build))
    manifest = publication.manifest()
    start = len(manifest.modules) + len(manifest.objects)
    objects = (
        *manifest.objects,
        ObjectSpec(0, Step("attribute", VStr("_modules")), "builtins:dict"),
        ObjectSpec(0, Step("attribute", VStr("apart")), "builtins:tuple"),
        ObjectSpec(start + 1, Step("index", VInt(0)), "torch.nn.modules.linear:Linear"),
    )
    table = VDict(((VStr("0"), VObject(start + 2)), (VStr("1"), VObject(2))))
    edit = Edit(0, Step("attribute", VStr("_modules")), table)
    if in_place:
        edit = Edit(start, Step("key", VStr("0")), VObject(start + 2))
    with pytest.raises(RebindError, match="still on the meta device"):
        rebind_to(publication, build_meta(build), changed(publication, objects=objects, edits=(edit,)))


def test_collection_is_left_as_it_was(publication: Publication) -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            rebind_to(publication, build_meta(Net))
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def is_old(thing: object) -> bool:
    old = [2] if sys.version_info < (3, 14) else [1, 2]
    return any(found is thing for generation in old for found in gc.get_objects(generation=generation))


def test_what_the_first_rebind_of_a_process_made_is_not_collected_through_again(
    publication: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first: a process that goes on so would never have a full collection, and keep every cycle."""
    monkeypatch.setattr(rebinding, "_made_old", False)
    gc.collect()
    modules = [build_meta(Net), build_meta(Net)]
    for module in modules:
        rebind_to(publication, module)
    assert [is_old(module.lin.weight) for module in modules] == [True, False]


def test_what_somebody_froze_stays_frozen(publication: Publication, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebinding, "_made_old", False)
    gc.collect()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        rebind_to(publication, build_meta(Net))
        assert gc.get_freeze_count() > frozen // 2  # some of them may have ended since
    finally:
        gc.unfreeze()


def test_writes_stay_in_the_client_and_readonly_maps(publication: Publication) -> None:  # F21
    one, _ = publication.attach(Net)
    two, _ = publication.attach(Net)
    with torch.no_grad():
        one.lin.weight.add_(1)
    assert not torch.equal(one.lin.weight, two.lin.weight)
    three, _ = publication.attach(Net, access=Access.READONLY)
    assert torch.equal(three.lin.weight, two.lin.weight)


# ---- the manifest is not believed (see also ``test_manifest``) -----------------------------------------------------------------


def changed(publication: Publication, **fields: Any) -> Manifest:
    manifest = msgspec.structs.replace(publication.manifest(), **fields)
    return decode_manifest(encode_manifest(manifest))


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


def test_an_enum_or_class_that_is_not_loaded_is_not_imported(publication: Publication) -> None:
    import sys

    from torchwcache.encoding import VEnum

    assert "turtle" not in sys.modules
    edit = Edit(0, Step("attribute", VStr("x")), VEnum("turtle:Turtle", "RED"))
    with pytest.raises(RebindError, match="does not exist in this process"):
        rebind_to(publication, build_meta(Net), changed(publication, edits=(edit,)))
    for cls in ("turtle:Turtle", "os:system"):
        tensors = publication.manifest().tensors
        kinds = tuple(msgspec.structs.replace(kind, cls=cls) for kind in tensors.kinds)
        with pytest.raises(RebindError, match="does not exist in this process"):
            rebind_to(publication, build_meta(Net), changed(publication, tensors=msgspec.structs.replace(tensors, kinds=kinds)))
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
