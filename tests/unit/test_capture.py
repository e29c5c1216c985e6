"""What a capture carries, and what it refuses."""

from __future__ import annotations

import collections
import enum
import functools
import io
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.roundtrip import CPU, Publication, build_meta, capture_loaded, roundtrip
from torch import nn
from torch.nn.utils import prune

from torchwcache.adapter import CaptureRules
from torchwcache.errors import CaptureError
from torchwcache.module.capture import capture
from torchwcache.module.classes import ClassSnapshot

ALL_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip


class State(enum.Enum):
    RAW = 1
    READY = 2


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)


def problems_of(loaded: nn.Module, build: Callable[[], nn.Module], rules: CaptureRules | None = None) -> dict[str, str]:
    with pytest.raises(CaptureError) as caught:
        capture_loaded(loaded, build, rules)
    return dict(caught.value.problems)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(_raw(a)) == bytes(_raw(b))


def _raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous()
    offset, nbytes = plain.storage_offset() * plain.element_size(), plain.numel() * plain.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage(), offset, (nbytes,), (1,)).numpy().tobytes()


# ---- tensors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_as_parameter_and_buffer(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 5, dtype=dtype), requires_grad=False)
            self.register_buffer("scale", torch.zeros(2, dtype=dtype), persistent=False)

    loaded = Net().eval()
    for tensor in (loaded.weight, loaded.scale):
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        raw.copy_(torch.arange(raw.numel()) % (2 if dtype is torch.bool else 251))
    expected = [loaded.weight.detach().clone(), loaded.scale.clone()]
    attached = roundtrip(loaded, Net)
    assert same_bytes(attached.weight, expected[0])
    assert same_bytes(attached.scale, expected[1])
    assert isinstance(attached.weight, nn.Parameter)
    assert "scale" not in attached.state_dict()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1,), (2, 3, 4, 5)], ids=str)
def test_every_shape(shape: tuple[int, ...]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(shape))
            self.register_buffer("state", torch.zeros(shape))
            self.extra = torch.zeros(shape)

    loaded = Net().eval()
    with torch.no_grad():
        loaded.weight.copy_(torch.randn(shape))
    expected = loaded.weight.detach().clone()
    attached = roundtrip(loaded, Net)
    assert torch.equal(attached.weight, expected)
    assert attached.state.shape == attached.extra.shape == shape


def test_tied_parameters_stay_one_object() -> None:  # F5
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.hidden = {"again": self.embed.weight}

    attached = roundtrip(Net().eval(), Net)
    assert attached.head.weight is attached.embed.weight is attached.hidden["again"]
    assert [name for name, _ in attached.named_parameters()] == ["embed.weight"]


def test_a_tie_made_by_the_load_and_one_undone_by_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(2, 2) for _ in range(4))
            self.b.weight = self.a.weight

    loaded = Net().eval()
    loaded.b.weight = nn.Parameter(torch.ones(2, 2))
    loaded.d.weight = loaded.c.weight
    attached = roundtrip(loaded, Net)
    assert attached.b.weight is not attached.a.weight
    assert attached.d.weight is attached.c.weight


def test_views_and_overlapping_strides_share_memory_afterwards() -> None:  # F8, F12
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(torch.zeros(12, 4))

    loaded = Net().eval()
    loaded.q, loaded.k = loaded.qkv.data[:4], loaded.qkv.data[4:8]
    loaded.windows = [loaded.qkv.data.as_strided((5, 8), (4, 1)), {"transposed": loaded.qkv.data.t()}]
    attached = roundtrip(loaded, Net)
    base = attached.qkv.data_ptr()
    assert attached.q.data_ptr() == base
    assert attached.k.data_ptr() == base + 4 * 4 * 4
    assert attached.windows[0].stride() == (4, 1)
    assert attached.windows[1]["transposed"].data_ptr() == base
    assert attached.q.untyped_storage().data_ptr() == attached.qkv.untyped_storage().data_ptr()
    assert attached.qkv.untyped_storage().nbytes() == 12 * 4 * 4


def test_a_storage_is_trimmed_to_what_is_viewed_and_is_one_torch_storage() -> None:  # D8
    class Net(nn.Module):
        pass

    loaded = Net().eval()
    big = torch.randn(100_000)
    loaded.part = big[500:600]
    expected = loaded.part.clone()
    captured = capture_loaded(loaded, Net)
    assert captured.nbytes < 1000
    attached, _ = Publication(captured).attach(Net)
    assert torch.equal(attached.part, expected)
    assert attached.part.untyped_storage().nbytes() < 1000


def test_two_storages_over_the_same_memory_alias_afterwards() -> None:  # D8
    class Net(nn.Module):
        pass

    loaded = Net().eval()
    memory = np.arange(64, dtype=np.float32)
    loaded.left, loaded.right = torch.from_numpy(memory[:40]), torch.from_numpy(memory[16:])
    attached = roundtrip(loaded, Net)
    assert attached.right.data_ptr() - attached.left.data_ptr() == 16 * 4
    attached.right[0] = -1
    assert attached.left[16] == -1
    assert attached.left.untyped_storage().data_ptr() == attached.right.untyped_storage().data_ptr()


def test_non_persistent_buffers_are_captured_and_stay_non_persistent() -> None:  # F6
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", 1.0 / torch.arange(1, 5), persistent=False)
            self.register_buffer("seen", torch.zeros(1))

    attached = roundtrip(Net().eval(), Net)
    assert torch.equal(attached.inv_freq, 1.0 / torch.arange(1, 5))
    assert list(attached.state_dict()) == ["seen"]


def test_parameter_subclasses_and_their_attributes() -> None:
    class Weight(nn.Parameter):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Weight(torch.zeros(2, 2))
            self.weight.loader = self.load  # a bound method: only the build can make it
            self.weight.shard = (0, None)

        def load(self) -> str:
            return "loaded"

    loaded = Net().eval()
    loaded.weight.is_shuffled = True
    loaded.weight.layout_info = {"block": [128, 128], "scale": torch.ones(3)}
    attached = roundtrip(loaded, Net)
    assert type(attached.weight) is Weight
    assert attached.weight.is_shuffled is True
    assert attached.weight.shard == (0, None)
    assert attached.weight.loader.__self__ is attached
    assert attached.weight.layout_info["block"] == [128, 128]
    assert torch.equal(attached.weight.layout_info["scale"], torch.ones(3))


class LoadedThrough(nn.Parameter):
    """As vLLM's parameters: the loader is a property, and asking for it may fail."""

    @property
    def loader(self) -> Any:
        return self._loader

    @property
    def broken(self) -> Any:
        raise ValueError("deleted")


class WithLoader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = LoadedThrough(torch.zeros(2, 2))
        self.weight._loader = self.load

    def load(self) -> str:
        return "loaded"

    def other(self) -> str:
        return "other"


def finished(attribute: str, value: Callable[[nn.Module], Any]) -> nn.Module:
    """What a load leaves that replaces its parameters by plain ones."""
    loaded = WithLoader().eval()
    loaded.weight = nn.Parameter(torch.ones(2, 2))
    setattr(loaded.weight, attribute, value(loaded))
    return loaded


def test_a_bound_method_that_was_a_property_of_what_the_load_replaced() -> None:
    attached = roundtrip(finished("loader", lambda loaded: loaded.load), WithLoader)
    assert type(attached.weight) is nn.Parameter
    assert torch.equal(attached.weight, torch.ones(2, 2))
    assert attached.weight.__dict__["loader"].__self__ is attached
    assert attached.weight.loader() == "loaded"


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("loader", lambda loaded: loaded.other),
        ("loader", lambda loaded: WithLoader().load),
        ("broken", lambda loaded: loaded.load),
        ("nowhere", lambda loaded: loaded.load),
    ],
    ids=["another method", "of another module", "a property that fails", "no property"],
)
def test_a_bound_method_that_the_build_does_not_have_there_is_refused(attribute: str, value: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(CaptureError, match=f"weight.{attribute}"):
        roundtrip(finished(attribute, value), WithLoader)


@pytest.mark.parametrize("keep", [False, True])
def test_requires_grad_is_recorded(keep: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)

    attached = roundtrip(Net().eval(), Net, requires_grad=keep)
    assert (attached.a.requires_grad, attached.b.requires_grad) == (keep, False)


def test_conj_and_neg_views() -> None:
    loaded = nn.Module().eval()
    base = torch.randn(4, dtype=torch.complex64)
    loaded.pair = [base, base.conj(), torch._neg_view(base.real)]
    expected = [t.clone() for t in loaded.pair]
    attached = roundtrip(loaded, nn.Module)
    for mine, theirs in zip(attached.pair, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert attached.pair[1].is_conj()


def test_an_lstm_keeps_its_weak_references() -> None:  # D5
    loaded = nn.LSTM(3, 4, num_layers=2).eval()
    x = torch.randn(5, 1, 3)
    expected = loaded(x)[0]
    attached = roundtrip(loaded, lambda: nn.LSTM(3, 4, num_layers=2))
    assert torch.equal(attached(x)[0], expected)
    assert attached._flat_weights[0] is attached.weight_ih_l0
    assert attached._flat_weight_refs[0]() is attached.weight_ih_l0


# ---- python-side state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1, 1.5, float("nan"), -0.0, 2**90, "text", b"bytes", 1j, ..., State.READY, torch.bfloat16, CPU,
        torch.Size([1, 2]),
        torch.channels_last, range(3), slice(1, None), (1, (2, "x")), [1, [2]], {"a": {"b": 1}}, {1: 2}, {1, 2}, frozenset({3}),
        collections.OrderedDict(a=1), collections.deque([1], maxlen=3), (True, 1, "1"),
    ],
    ids=repr,
)  # fmt: skip
def test_attributes_that_the_load_stamped(value: Any) -> None:  # F9
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.changed = "as built"

    loaded = Net().eval()
    loaded.changed = value
    loaded.added = value
    attached = roundtrip(loaded, Net)
    for found in (attached.changed, attached.added):
        assert type(found) is type(value)
        assert repr(found) == repr(value)


def test_an_attribute_set_to_none_and_one_deleted() -> None:  # F9
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_scale = nn.Parameter(torch.ones(1))
            self.plain, self.gone = torch.ones(2), 5

    loaded = Net().eval()
    loaded.input_scale = None
    loaded.plain = None
    del loaded.gone
    attached = roundtrip(loaded, Net)
    assert attached.input_scale is None
    assert attached.plain is None
    assert not hasattr(attached, "gone")


def test_leaves_are_replaced_inside_shared_containers() -> None:  # D5
    class Config:
        def __init__(self) -> None:
            self.layers = [1, 2]
            self.path = "built"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.inner = nn.Linear(1, 1)
            self.inner.config = self.config
            self.table = self.config.layers

    loaded = Net().eval()
    loaded.config.layers[1] = 7
    loaded.config.path = "loaded"
    attached = roundtrip(loaded, Net)
    assert attached.inner.config is attached.config
    assert attached.table is attached.config.layers
    assert attached.table == [1, 7]
    assert attached.config.path == "loaded"


def test_new_containers_that_are_shared_stay_shared_even_with_themselves() -> None:
    loaded = Plain().eval()
    shared: list[Any] = [1]
    shared.append(shared)
    loaded.one, loaded.two = shared, {"again": shared}
    attached = roundtrip(loaded, Plain)
    assert attached.two["again"] is attached.one
    assert attached.one[1] is attached.one


def test_tensors_in_closures_defaults_partials_and_named_tuples() -> None:  # D5
    Pair = collections.namedtuple("Pair", "weight note")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))
            weight = self.weight
            self.closure = lambda: weight
            self.default = lambda w=weight: w
            self.keyword = lambda *, w=weight: w
            self.partial = functools.partial(torch.add, weight, alpha=2)
            self.pair = Pair(weight, "n")
            self.bound = self.method
            self.ref = weakref.ref(weight)

        def method(self) -> torch.Tensor:
            return self.weight

    loaded = Net().eval()
    with torch.no_grad():
        loaded.weight.fill_(3)
    attached = roundtrip(loaded, Net)
    for found in (
        attached.closure(), attached.default(), attached.keyword(), attached.partial.args[0], attached.pair.weight,
        attached.bound(), attached.ref(),
    ):  # fmt: skip
        assert found is attached.weight
    assert type(attached.pair) is Pair
    assert attached.bound.__self__ is attached


def test_slots_dataclasses_and_hidden_modules() -> None:
    class Slotted:
        __slots__ = ("flag", "tensor")

        def __init__(self) -> None:
            self.tensor = torch.zeros(2)
            self.flag = False

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slotted = Slotted()
            self.hidden = [nn.Linear(2, 2)]  # a plain list: not part of the module tree

    loaded = Net().eval()
    loaded.slotted.flag = True
    loaded.slotted.tensor = torch.ones(2)
    expected = loaded.hidden[0].weight.detach().clone()
    attached = roundtrip(loaded, Net)
    assert attached.slotted.flag is True
    assert torch.equal(attached.slotted.tensor, torch.ones(2))
    assert torch.equal(attached.hidden[0].weight, expected)


def test_training_mode_of_each_module() -> None:
    loaded = nn.Sequential(nn.Dropout(), nn.Linear(1, 1)).train()
    loaded[0].eval()
    attached = roundtrip(loaded, lambda: nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))
    assert [m.training for m in (attached, attached[0], attached[1])] == [True, False, True]


def test_a_class_attribute_that_the_load_changed() -> None:  # D5
    class Net(nn.Module):
        backend = "auto"

    snapshot = ClassSnapshot(build_meta(Net))
    loaded = Net().eval()
    Net.backend = "flash"
    publication = Publication(capture_loaded(loaded, Net, classes=snapshot))
    Net.backend = "auto"  # as it is in a fresh process
    publication.attach(Net)
    assert Net.backend == "flash"
    Net.backend = "something else"
    with pytest.raises(Exception, match="was changed in this process"):
        publication.attach(Net)


def test_a_class_attribute_changed_to_something_opaque_is_refused() -> None:
    class Net(nn.Module):
        kernel: Any = None

    snapshot = ClassSnapshot(build_meta(Net))
    loaded = Net().eval()
    Net.kernel = object()
    with pytest.raises(CaptureError, match="kernel"):
        capture_loaded(loaded, Net, classes=snapshot)


@pytest.mark.parametrize("where", ["itself", "in a dict"])
def test_a_tensor_of_a_class_that_the_load_wrote_to_is_refused(where: str) -> None:
    class Net(nn.Module):
        table: Any = torch.ones(2) if where == "itself" else {"table": torch.ones(2)}

    snapshot = ClassSnapshot(build_meta(Net))
    capture_loaded(Net().eval(), Net, classes=snapshot)
    (Net.table if where == "itself" else Net.table["table"]).mul_(2)
    with pytest.raises(CaptureError, match="table"):
        capture_loaded(Net().eval(), Net, classes=snapshot)


# ---- what is refused ---------------------------------------------------------------------------------------------------------


def _set(name: str, make: Callable[[], Any]) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, make())


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (_set("kernel", lambda: lambda x: x), "kernel"),
        (_set("opaque", lambda: object()), "opaque"),
        (_set("handle", lambda: threading.Thread()), "handle"),
        (_set("array", lambda: np.ones(3)), "array"),
        (_set("inside", lambda: {"deep": [object()]}), "inside"),
        (lambda m: m.register_forward_hook(lambda *a: None), "_forward_hooks"),
        (_set("sparse", lambda: torch.ones(2, 2).to_sparse()), "sparse"),
        (_set("quantized", lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)), "quantized"),
        (_set("meta", lambda: torch.empty(2, device="meta")), "meta"),
        (_set("nested", lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])), "nested"),
        (_set("dead", lambda: weakref.ref(type("T", (), {})())), "dead"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_refused_with_its_path(change: Callable[[nn.Module], None], path: str) -> None:
    loaded = Plain().eval()
    change(loaded)
    assert any(found.startswith(path) for found in problems_of(loaded, Plain))


def _half(x: Any) -> Any:
    return x / 2


def _double(x: Any) -> Any:
    return x * 2


class Opaque(nn.Module):
    """Holds, as built, one each of what a load may put something else of its kind in the place of."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Any = _half
        self.array = np.zeros(3)
        self.partial = functools.partial(_half, x=1)
        self.file = io.BytesIO(b"built")
        self.random = random.Random(1)
        self.inside = {"function": _half}


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("function", _set("function", lambda: _double)),
        ("array", _set("array", lambda: np.ones(3))),
        ("array", lambda m: m.array.fill(2)),
        ("partial", _set("partial", lambda: functools.partial(_double, x=1))),
        ("file", lambda m: m.file.write(b"load")),
        ("random", lambda m: m.random.seed(2)),
        ("inside", lambda m: m.inside.update(function=_double)),
    ],
)  # fmt: skip
def test_what_the_load_put_in_the_place_of_its_like_is_refused(path: str, change: Callable[[Any], None]) -> None:
    # It must not count as the object that the build makes in that place: then the build's would be served, and nobody told.
    loaded = Opaque().eval()
    if path in ("function", "inside"):
        loaded.inside, loaded.function = (loaded.inside, None) if path == "inside" else ({}, loaded.function)
    change(loaded)

    def build() -> nn.Module:
        built = Opaque()
        if path in ("function", "inside"):
            built.inside, built.function = (built.inside, None) if path == "inside" else ({}, built.function)
        return built

    assert any(found.startswith(path) for found in problems_of(loaded, build))
    capture_loaded(build().eval(), build)  # as built it can be carried


def test_an_array_over_the_memory_of_a_tensor_is_refused() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tensor = torch.zeros(4)
            self.array = self.tensor.numpy()

    def build() -> nn.Module:
        with torch.device("cpu"):
            return Aliased()

    assert "memory of tensor" in problems_of(build().eval(), build)["array"]


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_a_gradient_are_refused(hook: str) -> None:
    loaded = Plain().eval()
    getattr(loaded.lin.weight, hook)(lambda gradient: None)
    assert "hooks on its gradient" in problems_of(loaded, Plain)["lin.weight"]


def test_a_tensor_that_clients_would_lack_cannot_be_ignored() -> None:
    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = {"keys": [torch.zeros(2)]}

    rules = CaptureRules(ignore={"cache": "scratch"})
    assert "no value in a client" in problems_of(Scratch().eval(), Scratch, rules)["cache"]


def test_every_problem_is_listed_at_once() -> None:
    loaded = Plain().eval()
    loaded.one, loaded.lin.two = object(), object()
    loaded.lin.bias.grad = torch.ones(4)
    assert set(problems_of(loaded, Plain)) == {"one", "lin.two", "lin.bias"}


def test_a_tree_that_the_load_changed_is_refused() -> None:
    loaded = Plain().eval()
    loaded.lora = nn.Linear(1, 1)
    assert "lora" in problems_of(loaded, Plain)
    loaded = Plain().eval()
    loaded.lin = nn.Bilinear(1, 1, 1)  # type: ignore[assignment]
    assert "Bilinear" in problems_of(loaded, Plain)["lin"]
    loaded = Plain().eval()
    del loaded.lin
    assert "lin" in problems_of(loaded, Plain)


def test_uninitialized_parameters_are_refused() -> None:  # F7
    loaded = nn.Sequential(nn.LazyLinear(3)).eval()
    assert "uninitialized" in problems_of(loaded, lambda: nn.Sequential(nn.LazyLinear(3)))["0.weight"]


@pytest.mark.parametrize("where", ["attribute", "list", "tensor", "uint64 tensor"])
def test_addresses_are_refused(where: str) -> None:  # D6
    loaded = Plain().eval()
    address = loaded.lin.weight.data_ptr() + 8
    if where == "attribute":
        loaded.pointer = address
    elif where == "list":
        loaded.pointers = [0, address]
    else:
        loaded.pointers = torch.tensor([3, address], dtype=torch.int64).view(torch.uint64 if "uint64" in where else torch.int64)
    (path, reason), *_ = problems_of(loaded, Plain).items()
    assert path.startswith("pointer")
    assert "address" in reason


def test_integers_that_are_no_addresses_pass() -> None:
    loaded = Plain().eval()
    loaded.numbers = torch.tensor([0, 1, -1, 2**62, 4096])
    loaded.count = 10**15
    assert roundtrip(loaded, Plain).count == 10**15


def test_an_ignored_attribute_needs_no_carrying() -> None:
    loaded = Plain().eval()
    loaded.lin.handle = object()
    attached = roundtrip(loaded, Plain, CaptureRules(ignore={"lin.han*": "belongs to the process"}))
    assert not hasattr(attached.lin, "handle")


# ---- what is shared and what is copied (D9) ----------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))
        self.register_buffer("running", torch.zeros(32))
        self.table = torch.zeros(16)


def test_parameters_are_shared_buffers_and_plain_tensors_are_copied() -> None:  # F23
    publication = Publication(capture_loaded(Mixed().eval(), Mixed))
    one, report = publication.attach(Mixed)
    two, _ = publication.attach(Mixed)
    assert (report.mapped_nbytes, report.copied_nbytes) == (256, 192)
    one.running.add_(1)
    one.table.add_(1)
    assert float(two.running.sum()) == float(two.table.sum()) == 0


def test_declared_constants_are_shared() -> None:
    publication = Publication(capture_loaded(Mixed().eval(), Mixed, CaptureRules(constants=("table", "running"))))
    assert publication.attach(Mixed)[1].copied_nbytes == 0


def test_a_buffer_over_a_parameters_memory_is_refused_unless_it_is_constant() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(4))
        module.register_buffer("alias", module.weight.data[:2])
        return module

    assert "alias" in problems_of(build().eval(), build)
    attached = roundtrip(build().eval(), build, CaptureRules(constants=("alias",)))
    assert attached.alias.data_ptr() == attached.weight.data_ptr()


# ---- the producer ------------------------------------------------------------------------------------------------------------


def test_the_producer_lives_on_the_published_bytes_with_the_same_objects() -> None:
    loaded = Plain().eval()
    weight, before = loaded.lin.weight, loaded.lin.weight.detach().clone()
    address = weight.data_ptr()
    publication = Publication(capture_loaded(loaded, Plain))
    assert loaded.lin.weight is weight
    assert weight.data_ptr() != address
    with torch.no_grad():
        weight.zero_()  # its own copy
    attached, _ = publication.attach(Plain)
    assert torch.equal(attached.lin.weight, before)


def test_capture_changes_nothing() -> None:
    loaded = Plain().eval()
    state, address = dict(loaded.__dict__), loaded.lin.weight.data_ptr()
    capture(loaded, build_meta(Plain), device=CPU)
    assert loaded.__dict__ == state
    assert loaded.lin.weight.data_ptr() == address


# ---- modules of every kind ---------------------------------------------------------------------------------------------------


def _hooked() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda mod, args, output: output + 1)
    module.register_forward_pre_hook(lambda mod, args: (args[0] * 2,))
    return module


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:.*nested_tensor:UserWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
        lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5),
        _hooked,
        lambda: nn.GRU(4, 4, bidirectional=True),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2),
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
    ],
    ids=["parametrized", "spectral", "weight_norm", "pruned", "hooked", "gru", "transformer", "batchnorm"],
)
def test_modules_of_every_kind_compute_the_same(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    loaded, x = build().eval(), torch.randn(2, 3, 4) if build().__class__.__name__ == "TransformerEncoder" else torch.randn(3, 4)
    with torch.no_grad():
        expected = loaded(x)
        attached = roundtrip(loaded, build)
        found, again = attached(x), loaded(x)
    for result in (found, again):
        pairs = zip(expected, result, strict=True) if isinstance(expected, tuple) else [(expected, result)]
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_script_module_is_refused() -> None:
    loaded = torch.jit.script(nn.Linear(2, 2)).eval()
    assert "ScriptModule" in problems_of(loaded, lambda: torch.jit.script(nn.Linear(2, 2)))["(root)"]
