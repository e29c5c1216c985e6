"""F10 and the gate: what is refused, by which name, and what must not be taken for quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.errors import PluginError, UnsupportedQuantizationError
from torchwcache.quantization.registry import METHODS, check_config, check_tensors, stated_method
from torchwcache.quantization.unquantized import Unquantized


class Holder(nn.Module):
    """A module with whatever tensors a test wants: ``p_`` parameters, ``a_`` attributes, anything else buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if name.startswith("p_"):
                self.register_parameter(name[2:], nn.Parameter(tensor, requires_grad=False))
            elif name.startswith("a_"):
                self.__dict__[name[2:]] = tensor
            else:
                self.register_buffer(name, tensor)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


# ---- by config ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, {}])
@pytest.mark.parametrize("requested", [None, "unquantized"])
def test_no_stated_quantization_passes(config: Any, requested: str | None) -> None:
    assert check_config(config, requested) == "unquantized"


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors (pack-quantized)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt (NVFP4)"),
        ({"load_in_4bit": True}, "bitsandbytes (load_in_4bit)"),
        ({"bits": 4}, "an unnamed method"),
    ],
)
@pytest.mark.parametrize("requested", [None, "unquantized"])
def test_every_other_method_is_refused_by_name_with_the_way_out(config: Any, method: str, requested: str | None) -> None:
    assert stated_method(config) == method
    with pytest.raises(UnsupportedQuantizationError) as caught:
        check_config(config, requested)
    assert (caught.value.method, caught.value.module, caught.value.verified) == (method, None, ("unquantized",))
    for part in (method, "Verified methods: unquantized", 'on_refused="load"', "dequantize"):
        assert part in str(caught.value)


def test_asking_for_an_unlisted_method_is_refused() -> None:
    with pytest.raises(UnsupportedQuantizationError, match="'awq'"):
        check_config(None, "awq")


def test_a_new_method_is_listed_by_registering_it_with_its_evidence() -> None:
    class Mine(Unquantized):
        name = "mine"
        evidence = "this test"

        def accepts(self, quantization_config: Any) -> bool:
            return bool(quantization_config) and quantization_config.get("quant_method") == "mine"

    METHODS.register("mine", Mine())
    try:
        assert check_config({"quant_method": "mine"}) == "mine"
        assert check_config({"quant_method": "mine"}, "mine") == "mine"
        with pytest.raises(UnsupportedQuantizationError):
            check_config(None, "mine")
    finally:
        METHODS.unregister("mine")
    with pytest.raises(PluginError):
        METHODS.get("mine")


def test_every_listed_method_names_its_evidence() -> None:
    for name in METHODS.names():
        assert len(METHODS.get(name).evidence) > 10


# ---- by tensors --------------------------------------------------------------------------------------------------------------

PACKED: dict[str, Callable[[], nn.Module]] = {
    "weight": lambda: Holder(p_weight=torch.ones(4, 4).to(torch.float8_e4m3fn)),
    "scale_inv": lambda: Holder(scale_inv=torch.ones(4).to(torch.float8_e8m0fnu)),
    "kv": lambda: Holder(a_kv=torch.ones(4).to(torch.float8_e5m2)),
    "w": lambda: Holder(p_w=ints(4, 4)),
    "codes": lambda: Holder(codes=ints(4, dtype=torch.uint8)),
    "qweight": lambda: Holder(qweight=ints(4, 4), qzeros=ints(4, 4), scales=torch.ones(4)),
    "weight_packed": lambda: Holder(weight_packed=ints(4, 4), weight_scale=torch.ones(4)),
    "W_q": lambda: Holder(W_q=ints(4, 4, dtype=torch.uint8)),
    "data": lambda: Holder(data=ints(4, 4, dtype=torch.int8), p_weight_scale=torch.ones(4)),
    "blocks": lambda: Holder(a_blocks=ints(4, 4, dtype=torch.uint8), zeros=torch.ones(4)),
    "quantized": lambda: Holder(quantized=torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_layout_gives_itself_away(name: str) -> None:
    tree = nn.Sequential(nn.Linear(2, 2), PACKED[name]())
    with pytest.raises(UnsupportedQuantizationError) as caught:
        check_tensors("unquantized", tree)
    assert caught.value.module == f"1.{name}"


class Params4bit(nn.Parameter):
    """As bitsandbytes calls it."""


def test_foreign_tensor_classes_are_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    module.weight = Params4bit(torch.ones(2, 2))
    with pytest.raises(UnsupportedQuantizationError, match="Params4bit"):
        check_tensors("unquantized", module)


def test_wrapper_subclasses_are_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(UnsupportedQuantizationError, match="TwoTensor"):
        check_tensors("unquantized", Holder(pair=TwoTensor(torch.ones(2), torch.ones(2))))


@pytest.mark.filterwarnings("ignore")
def test_quantized_module_classes_are_refused() -> None:
    with pytest.raises(UnsupportedQuantizationError, match="quantized"):
        check_tensors("unquantized", nn.Sequential(torch.ao.nn.quantized.Linear(2, 2)))


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "positions": lambda: Holder(position_ids=torch.arange(5)[None], p_scale=torch.ones(1)),
    "relative positions (Swin v2)": lambda: Holder(relative_position_index=ints(4, 4), p_logit_scale=torch.ones(1)),
    "int32 index beside a scale": lambda: Holder(relative_position_index=ints(4, 4), p_scale=torch.ones(1)),
    "uint8 mask beside scales": lambda: Holder(attn_mask=ints(4, 4, dtype=torch.uint8), scales=torch.ones(4)),
    "GPT-2's causal mask": lambda: Holder(bias=ints(1, 1, 4, 4, dtype=torch.uint8), masked_bias=torch.tensor(-1e4)),
    "bool buffers": lambda: Holder(p_keep=torch.ones(4, dtype=torch.bool), mask=torch.ones(4, 4, dtype=torch.bool)),
    "counter": lambda: nn.BatchNorm1d(4),
    "layer scale": lambda: Holder(p_layer_scale=torch.ones(4), table=ints(4, 4)),
    "int matrix without scales": lambda: Holder(vocabulary=ints(4, 4)),
    "complex": lambda: Holder(freqs=torch.ones(4, dtype=torch.complex64)),
    "LSTM": lambda: nn.LSTM(2, 2),
    "nothing": lambda: nn.Identity(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_ordinary_integer_buffers_pass(name: str) -> None:
    check_tensors("unquantized", nn.Sequential(PLAIN[name]()))
