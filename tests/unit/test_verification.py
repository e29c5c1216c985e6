"""Descriptions of modules, as two processes exchange them: each thing that is compared is corrupted once, and must be named."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.corruptions import CORRUPTIONS, Net
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.errors import EncodingError
from torchwcache.module.difference import Difference
from torchwcache.verification.comparison import Compared, compare_descriptions, compare_outputs
from torchwcache.verification.describe import describe_module
from torchwcache.verification.description import OutputFacts, decode_description, encode_description
from torchwcache.verification.inputs import describe_outputs, generate_inputs, inputs_from
from torchwcache.verification.record import VerificationRecord, record_id

# Where a description speaks of a module where the comparison in one process speaks of its state.
NAMED = {"class": "act: class: expected torch.nn.modules.activation:ReLU", "module added": "lora: module: expected nothing"}


class Rich(nn.Module):
    """State of every kind that a description tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.again = self.inner
        self.ordered = OrderedDict(a=1, b=2)
        self.names = {"x", "y"}
        self.pair = (1, [2.0])
        self.aliases = [self.ordered, self.ordered]
        self.scale = functools.partial(torch.mul, torch.ones(2), out=None)
        scale = 3.0
        self.closure = lambda x: x * scale
        self.bound = self.inner.forward
        self.weak = weakref.ref(self.inner)
        self.space = types.SimpleNamespace(depth=2)
        self.pattern = re.compile("a+")
        self.table = np.arange(3)
        self.generator = torch.Generator().manual_seed(1)
        self.lock = threading.Lock()
        self.dtype = torch.bfloat16
        self.size = torch.Size([1, 2])
        self.zero = 0.0
        self.kind = nn.ReLU
        self.inner.register_forward_hook(_hook)
        self.strided = torch.empty(12)[::3].fill_(1)
        self.turned = torch.arange(6.0).reshape(2, 3).t()
        self.none = torch.zeros(0)


def _hook(module: nn.Module, args: Any, output: Any) -> None:
    pass


def _other_hook(module: nn.Module, args: Any, output: Any) -> None:
    return None if module else output


RICH: dict[str, tuple[Callable[[Rich], object], str]] = {
    "order of a dict": (lambda m: m.ordered.move_to_end("a"), "ordered: attribute"),
    "set": (lambda m: m.names.add("z"), "names: attribute"),
    "inside a tuple": (lambda m: m.pair[1].append(1), "pair[1]: attribute"),
    "alias broken": (lambda m: m.aliases.__setitem__(1, OrderedDict(m.ordered)), "aliases[1]: is the same object as"),
    "module shared no more": (lambda m: setattr(m, "again", nn.Linear(2, 2)), "again: is the same module as"),
    "tensor in a partial": (lambda m: m.scale.args[0].zero_(), "scale.<partial_arg 0>: values"),
    "closure": (lambda m: setattr(m.closure.__closure__[0], "cell_contents", 4.0), "closure.<cell 0>: attribute"),
    "code": (lambda m: setattr(m, "closure", lambda x: x), "closure: attribute"),
    "bound method": (lambda m: setattr(m, "bound", m.inner.extra_repr), "bound.__func__: attribute"),
    "weak reference": (lambda m: setattr(m, "weak", weakref.ref(m)), "weak.<weakref>: is the same object as"),
    "namespace": (lambda m: setattr(m.space, "depth", 3), "space.depth: attribute"),
    "pattern": (lambda m: setattr(m, "pattern", re.compile("b+")), "pattern: attribute"),
    "array": (lambda m: m.table.__setitem__(0, 9), "table: attribute"),
    "generator": (lambda m: m.generator.manual_seed(2), "generator: attribute"),
    "type of an opaque object": (lambda m: setattr(m, "lock", threading.RLock()), "lock: attribute"),
    "dtype": (lambda m: setattr(m, "dtype", torch.float16), "dtype: attribute"),
    "size": (lambda m: setattr(m, "size", (1, 2)), "size: attribute"),
    "sign of zero": (lambda m: setattr(m, "zero", -0.0), "zero: attribute"),
    "kind of number": (lambda m: setattr(m, "zero", 0), "zero: attribute"),
    "class as a value": (lambda m: setattr(m, "kind", nn.GELU), "kind: attribute"),
    "hook": (lambda m: m.inner._forward_hooks.update(dict.fromkeys(m.inner._forward_hooks, _other_hook)), "_forward_hooks[0]"),
    "hook removed": (lambda m: m.inner._forward_hooks.clear(), "inner._forward_hooks: attribute"),
    "element of a strided tensor": (lambda m: m.strided[1].zero_(), "strided: bytes of its memory"),
    "requires_grad": (lambda m: m.inner.weight.requires_grad_(False), "inner.weight: requires_grad"),
    "empty tensor": (lambda m: setattr(m, "none", torch.zeros(0, 2)), "none: shape"),
    "class attribute": (lambda m: setattr(Rich, "layout", "column"), "Rich.layout: class attribute"),
}


def differences(one: nn.Module, two: nn.Module, **rules: Any) -> list[str]:
    found = [decode_description(encode_description(describe_module(module, **rules))) for module in (one, two)]
    return [str(difference) for difference in compare_descriptions(*found)[0]]


@pytest.mark.parametrize("build", [Net, Rich])
def test_equal_modules_are_equal(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    one = build()
    torch.manual_seed(0)
    assert differences(one, build()) == []


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_named(name: str) -> None:
    corrupt, expected = CORRUPTIONS[name]
    found = Net()
    with torch.no_grad():
        corrupt(found)
    assert any(NAMED.get(name, expected) in line for line in differences(Net(), found)), differences(Net(), found)


@pytest.mark.parametrize("name", RICH)
def test_each_corruption_of_state_is_named(name: str) -> None:
    corrupt, expected = RICH[name]
    torch.manual_seed(0)
    one = describe_module(Rich())
    torch.manual_seed(0)
    two = Rich()
    try:
        with torch.no_grad():
            corrupt(two)
        found, _ = compare_descriptions(one, describe_module(two))
        assert any(expected in str(line) for line in found), [str(line) for line in found]
    finally:
        if "layout" in Rich.__dict__:
            del Rich.layout


def test_the_order_of_attributes_and_the_gaps_between_elements_are_no_state() -> None:
    torch.manual_seed(0)
    one = Rich()
    torch.manual_seed(0)
    two = Rich()
    two.__dict__["zero"] = two.__dict__.pop("zero")
    two.strided.as_strided((2,), (3,), 1).fill_(7)
    two.inner._forward_hooks = OrderedDict({1000 + key: hook for key, hook in two.inner._forward_hooks.items()})
    assert differences(one, two) == []


def test_the_values_of_a_tensor_are_its_elements_wherever_they_lie() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    holder = nn.Module()
    holder.whole = values.clone()
    holder.turned = values.t().contiguous().t()
    holder.part = torch.zeros(4, 3)[1:3].copy_(values)
    holder.negated = torch.complex(torch.zeros(2, 3), -values).conj().imag
    facts = describe_module(holder).tensors
    assert holder.negated.is_neg()
    assert {facts[name].digest for name in ("whole", "turned", "part", "negated")} == {facts["whole"].digest}
    assert torch.equal(holder.negated, values)
    holder.negated = holder.negated + 0.0
    assert describe_module(holder).tensors["negated"].digest == facts["whole"].digest


def test_what_is_left_out_is_told_and_must_be_the_same() -> None:
    one, two = Net(), Net()
    two.mode = "elsewhere"
    assert differences(one, two, rules=CaptureRules(ignore={"mode": "differs by process"})) == []
    found, _ = compare_descriptions(describe_module(one), describe_module(one, rules=CaptureRules(ignore={"mode": "why"})))
    assert any("patterns of paths" in str(line) for line in found)


def test_what_cannot_be_looked_into_is_told() -> None:
    class Closed:
        __slots__ = ()

        def __reduce_ex__(self, version: int) -> Any:
            raise TypeError

    one = Net()
    one.handle = Closed()
    one.file = memoryview(b"x")
    _, compared = compare_descriptions(describe_module(one), describe_module(one))
    assert "file" in compared.opaque


def test_everything_is_counted() -> None:
    torch.manual_seed(0)
    _, compared = compare_descriptions(describe_module(Net()), describe_module(Net()))
    assert (compared.modules, compared.opaque) == (5, ())
    assert compared.tensors > 10
    assert compared.nbytes == sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _all(Net())}.values())


def _all(module: Net) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers(), module.views[1]["x"]]


def test_a_description_of_something_else_is_refused() -> None:
    for data in (b"", b"\xc0", encode_description(describe_module(Net()))[:-1]):
        with pytest.raises(EncodingError, match="not the description"):
            decode_description(data)


# ---- inputs and outputs ------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return {"logits": x * 2, "cache": types.SimpleNamespace(keys=[x]), "extra": (y if y is not None else x,)}


def pair_of_inputs(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(2), torch.ones(1)


def test_outputs_are_described_wherever_they_are() -> None:
    found = describe_outputs(Twice(), (torch.ones(2),), {})
    assert list(found) == ["output['logits']", "output['cache'].keys[0]", "output['extra'][0]"]
    assert found["output['logits']"].finite
    assert not describe_outputs(Twice(), (torch.tensor([float("nan")]),), {})["output['logits']"].finite


CHANGES = {"dtype": "float64", "shape": (3,), "digest": "0" * 32}


@pytest.mark.parametrize("name", CHANGES)
def test_each_difference_of_outputs_is_named(name: str) -> None:
    facts = OutputFacts(dtype="float32", shape=(2,), nbytes=8, finite=True, digest="1" * 32)
    (found,) = compare_outputs({"output": facts}, {"output": msgspec.structs.replace(facts, **{name: CHANGES[name]})})
    assert (found.path, found.expected) == ("output", str(getattr(facts, name)))
    assert [d.expected for d in compare_outputs({"output": facts}, {})] == ["an output"]
    assert [d.found for d in compare_outputs({}, {"output": facts})] == ["an output"]
    assert compare_outputs({"output": facts}, {"output": facts}) == ()


def test_inputs_come_from_a_file_or_a_function(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    from torchwcache.errors import CheckpointError, ConfigError

    save_file({"x": torch.ones(2)}, tmp_path / "in.safetensors")
    args, kwargs = inputs_from(str(tmp_path / "in.safetensors"), Twice())
    assert (args, list(kwargs)) == ((), ["x"])
    sys.modules["inputs_for_verification"] = types.SimpleNamespace(make=pair_of_inputs)  # type: ignore[assignment]
    try:
        one, two = (inputs_from("inputs_for_verification:make", Twice())[0] for _ in range(2))
    finally:
        del sys.modules["inputs_for_verification"]
    assert torch.equal(one[0], two[0])
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"broken\.safetensors"):
        inputs_from(str(tmp_path / "broken.safetensors"), Twice())
    for wrong in ("nowhere.safetensors", "nowhere_at_all:f"):
        with pytest.raises(ConfigError, match="nowhere"):
            inputs_from(wrong, Twice())
    with pytest.raises(ConfigError, match="Twice cannot be generated"):
        generate_inputs(Twice())
    with pytest.raises(ConfigError, match="no tensor"):
        describe_outputs(Mute(), (), {})


class Mute(nn.Module):
    def forward(self) -> str:
        return "nothing"


# ---- the record --------------------------------------------------------------------------------------------------------------


RECORD = VerificationRecord(
    checkpoint="model", model={"dtype": "bfloat16"}, label="Net", fingerprint="0" * 32, slot="model|cpu", deep=True, inputs=None,
    compared=Compared(modules=1, tensors=2, nbytes=3, opaque=("lock",)), ignored={"a": "why"}, versions={"torch": "2"},
    seconds={"load": 1.0, "attach": 0.1}, differences=(), when=datetime(2026, 1, 2, tzinfo=UTC),
)  # fmt: skip


def test_the_id_of_a_record_is_that_of_its_content() -> None:
    facts = RECORD.as_dict()
    again = json.loads(json.dumps(facts))
    assert re.fullmatch(r"parity-[0-9a-f]{32}", facts["id"])
    assert record_id(again) == facts["id"]
    again["compared"]["tensors"] = 3
    assert record_id(again) != facts["id"]
    assert (facts["equal"], facts["inputs"], facts["when"]) == (True, "generated", "2026-01-02T00:00:00+00:00")


def test_a_record_with_differences_is_not_equal() -> None:
    spoilt = replace(RECORD, differences=(Difference("a.weight", "dtype", "float32", "float16"),)).as_dict()
    assert spoilt["equal"] is False
    assert spoilt["differences"] == [{"path": "a.weight", "what": "dtype", "expected": "float32", "found": "float16"}]


def test_the_command_compares_without_torch() -> None:
    code = "import sys, torchwcache.verification.processes; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
