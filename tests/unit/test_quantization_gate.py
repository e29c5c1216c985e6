"""F10, F11 and the gate: what is refused, by which name, and what must not be taken for quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.errors import PluginError, UnsupportedQuantizationError
from torchwcache.quantization.block_fp8 import grid_of, quantize_block_fp8
from torchwcache.quantization.block_fp8_config import settings_of
from torchwcache.quantization.block_fp8_layers import BlockFP8Experts, BlockFP8Linear
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


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True, "dynamic": False}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "group"}}


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], **more}
    return {**config, "config_groups": {f"group_{i}": group for i, group in enumerate(groups)}}


def weights(**changes: Any) -> dict[str, Any]:
    return {**GROUP, "weights": {**WEIGHTS, **changes}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"quant_method": "gptq", "bits": 4}, "gptq", "packed integers"),
    ({"quant_method": "gptq_marlin", "bits": 4}, "gptq_marlin", "packed integers"),
    ({"quant_method": "awq", "bits": 4}, "awq", "packed integers"),
    ({"quant_method": "awq_marlin"}, "awq_marlin", "packed integers"),
    ({"quant_method": "marlin"}, "marlin", "repacked"),
    ({"quant_method": "fp8_marlin"}, "fp8_marlin", "repacked"),
    ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8", "per channel"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt (NVFP4)", "not block-wise"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt (FP8)", "not block-wise"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes", "packed"),
    ({"load_in_4bit": True}, "bitsandbytes (load_in_4bit)", "packed"),
    ({"quant_method": "torchao"}, "torchao", "subclasses"),
    ({"quant_method": "mxfp4"}, "mxfp4", "four bits"),
    ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "mxfp8", "eight bits"),
    ({"quant_method": "nvfp4"}, "nvfp4", "four bits"),
    ({"quant_method": "quark"}, "quark", "not block-wise"),
    ({"quant_method": "quanto"}, "quanto", "subclasses"),
    ({"quant_method": "hqq"}, "hqq", "packed integers"),
    ({"quant_method": "aqlm"}, "aqlm", "codebooks"),
    ({"quant_method": "gguf"}, "gguf", "GGUF"),
    ({"quant_method": "what is this"}, "what is this", "nobody has verified it"),
    ({"bits": 4}, "an unnamed method", "nobody has verified it"),
    # fp8 that is not block-wise, or not as it is verified
    ({"quant_method": "fp8"}, "fp8", "no weight_block_size"),
    ({**FP8, "weight_block_size": None}, "fp8", "no weight_block_size"),
    ({**FP8, "weight_block_size": [0, 128]}, "fp8", "not two positive integers"),
    ({**FP8, "weight_block_size": [128, -1]}, "fp8", "not two positive integers"),
    ({**FP8, "weight_block_size": [128]}, "fp8", "not two positive integers"),
    ({**FP8, "weight_block_size": 128}, "fp8", "not two positive integers"),
    ({**FP8, "weight_block_size": [128.0, 128]}, "fp8", "not two positive integers"),
    ({**FP8, "activation_scheme": "static"}, "fp8", "activation_scheme"),
    ({**FP8, "fmt": "e5m2"}, "fp8", "fmt"),
    ({**FP8, "scale_fmt": "ue8m0"}, "fp8", "scale_fmt"),
    ({**FP8, "expert_dtype": "fp4"}, "fp8", "expert_dtype"),
    ({**FP8, "modules_to_convert": ["embed"]}, "fp8", "modules_to_convert"),
    ({**FP8, "dequantize": True}, "fp8", "dequantize"),
    # F11: the same under another name, where it is not block-wise
    *(
        (compressed(weights(strategy=strategy)), "compressed-tensors (float-quantized)", f"{strategy!r} are not block-wise")
        for strategy in ("tensor", "channel", "token", "group", "tensor_group", None)
    ),
    (compressed(GROUP, weights(strategy="channel")), "compressed-tensors (float-quantized)", "'group_1'"),
    (compressed(weights(num_bits=4, type="int")), "compressed-tensors (float-quantized)", "not float8"),
    (compressed(weights(block_structure=None)), "compressed-tensors (float-quantized)", "not two positive integers"),
    (compressed(weights(symmetric=False)), "compressed-tensors (float-quantized)", "zero points"),
    (compressed({**GROUP, "targets": ["re:.*mlp.*"]}), "compressed-tensors (float-quantized)", "all linear layers"),
    (compressed({**GROUP, "input_activations": {"dynamic": False}}), "compressed-tensors (float-quantized)", "activations"),
    (compressed({**GROUP, "output_activations": {"num_bits": 8}}), "compressed-tensors (float-quantized)", "outputs"),
    (compressed({"targets": ["Linear"]}), "compressed-tensors (float-quantized)", "does not say"),
    (compressed(GROUP, weights(block_structure=[64, 64])), "compressed-tensors (float-quantized)", "different blocks"),
    (compressed(GROUP, kv_cache_scheme={"num_bits": 8}), "compressed-tensors (float-quantized)", "KV cache"),
    (compressed(GROUP, sparsity_config={"format": "sparse-24-bitmask"}), "compressed-tensors (float-quantized)", "sparse"),
    (compressed(GROUP, transform_config={"config_groups": {}}), "compressed-tensors (float-quantized)", "transform"),
    (compressed(), "compressed-tensors (float-quantized)", "no config_groups"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors (pack-quantized)", "no config_groups"),
]


@pytest.mark.parametrize(("config", "method", "reason"), REFUSED)
@pytest.mark.parametrize("requested", [None, "unquantized", "fp8"])
def test_every_other_method_is_refused_by_name_with_the_way_out(
    config: Any, method: str, reason: str, requested: str | None
) -> None:
    assert stated_method(config) == method
    with pytest.raises(UnsupportedQuantizationError) as caught:
        check_config(config, requested)
    assert (caught.value.method, caught.value.module, caught.value.verified) == (method, None, ("fp8", "unquantized"))
    for part in (method, "Verified methods: fp8, unquantized", 'on_refused="load"', "dequantize"):
        assert part in str(caught.value)
    if requested is None:
        assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("config", "block", "left_out"),
    [
        (FP8, (128, 128), None),
        ({"quant_method": "FP8", "weight_block_size": (16, 32), "modules_to_not_convert": ["a", "b"]}, (16, 32), ("a", "b")),
        ({**FP8, "ignored_layers": ["lm_head"], "scale_fmt": None}, (128, 128), ("lm_head",)),
        (compressed(GROUP), (128, 128), ("^lm_head$",)),
        (compressed(GROUP, GROUP, ignore=["re:.*gate$", "a.b"]), (128, 128), (".*gate$", r"^a\.b$")),
        (compressed(weights(block_structure=[16, 32]), ignore=None), (16, 32), ()),
    ],
)
@pytest.mark.parametrize("requested", [None, "fp8"])
def test_what_is_block_wise_is_fp8_whatever_it_is_called(
    config: Any, block: tuple[int, int], left_out: tuple[str, ...] | None, requested: str | None
) -> None:
    assert check_config(config, requested) == "fp8"
    assert (settings_of(config).block, settings_of(config).left_out) == (block, left_out)
    with pytest.raises(UnsupportedQuantizationError, match="'unquantized' was asked for"):
        check_config(config, "unquantized")


def test_only_who_asks_by_name_has_a_model_quantized() -> None:
    assert check_config(None) == "unquantized"
    assert check_config(None, "fp8") == "fp8"


def test_asking_for_an_unlisted_method_is_refused() -> None:
    with pytest.raises(UnsupportedQuantizationError, match="'awq'"):
        check_config(None, "awq")


def test_a_plugin_is_off_until_it_is_named() -> None:
    class Mine(Unquantized):
        name = "mine"
        evidence = "parity run 0123456789abcdef"

        def accepts(self, quantization_config: Any) -> bool:
            return bool(quantization_config) and quantization_config.get("quant_method") == "mine"

    METHODS.register("mine", Mine())
    try:
        assert check_config({"quant_method": "mine"}, "mine") == "mine"
        with pytest.raises(UnsupportedQuantizationError, match=r"off until named with .*: mine\)"):
            check_config({"quant_method": "mine"})
        with pytest.raises(UnsupportedQuantizationError):
            check_config(None, "mine")
    finally:
        METHODS.unregister("mine")
    with pytest.raises(PluginError):
        METHODS.get("mine")


@pytest.mark.parametrize("evidence", ["", "  ", None])
def test_a_plugin_without_evidence_stays_off(evidence: Any) -> None:
    class Mine(Unquantized):
        name = "mine"

    plugin = Mine()
    plugin.evidence = evidence
    METHODS.register("mine", plugin)
    try:
        with pytest.raises(UnsupportedQuantizationError, match="names no evidence"):
            check_config(None, "mine")
    finally:
        METHODS.unregister("mine")


def test_a_plugin_that_claims_a_taken_name_is_an_error_that_names_both() -> None:
    with pytest.raises(PluginError, match=r"torchwcache\.quantization\.block_fp8_method:BlockFP8.*torchwcache.*Unquantized"):
        METHODS.register("fp8", Unquantized())


def test_two_distributions_with_one_name_open_the_gate_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    METHODS.names()
    found = {name: list(points) for name, points in (METHODS._entry_points or {}).items()}
    found["fp8"] += found["unquantized"]
    monkeypatch.setattr(METHODS, "_entry_points", found)
    for config in (None, FP8):
        with pytest.raises(PluginError, match=r"BlockFP8' of torchwcache .* and by .*Unquantized'"):
            check_config(config)


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


# ---- block FP8 by tensors ----------------------------------------------------------------------------------------------------


def float8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def pair(out: int = 48, width: int = 32, block: tuple[int, int] = (16, 16), **changes: Any) -> Holder:
    """A module with a weight and its scales, as somebody else's class would hold them; ``changes`` are other tensors."""
    tensors = {"p_weight": float8(out, width), "p_weight_scale_inv": torch.ones(grid_of((out, width), block)), **changes}
    holder = Holder(**{name: tensor for name, tensor in tensors.items() if tensor is not None})
    holder.block_size = list(block)
    return holder


def experts() -> BlockFP8Experts:
    return BlockFP8Experts(4, 32, 24, nn.SiLU(), block_size=(16, 16))


SOUND: dict[str, Callable[[], nn.Module]] = {
    "a layer of ours": lambda: BlockFP8Linear(40, 24, block_size=(16, 16)),
    "experts of ours, with an edge": experts,
    "somebody else's module": pair,
    "compressed-tensors' name for scales": lambda: pair(p_weight_scale_inv=None, p_weight_scale=torch.ones(3, 2)),
    "fused experts under another name": lambda: pair(
        p_weight=None,
        p_weight_scale_inv=None,
        p_w13_weight=float8(2, 48, 32),
        p_w13_weight_scale_inv=torch.ones(2, 4, 2),
    ),
    "one block": lambda: pair(16, 16),
    "other layers in bfloat16": lambda: nn.Sequential(pair(), nn.Linear(4, 4, dtype=torch.bfloat16), nn.BatchNorm1d(3)),
    "on meta": lambda: BlockFP8Linear(256, 384, device="meta"),
}


@pytest.mark.parametrize("name", SOUND)
def test_float8_weights_with_their_scales_pass(name: str) -> None:
    tree = nn.Sequential(nn.Linear(2, 2), SOUND[name]())
    check_tensors("fp8", tree)
    with pytest.raises(UnsupportedQuantizationError, match="float8"):
        check_tensors("unquantized", tree)


UNSOUND: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "no scales": (lambda: pair(p_weight_scale_inv=None), "1.weight", "no block scales"),
    "two kinds of scales": (lambda: pair(p_weight_scale=torch.ones(3, 2)), "1.weight", "both"),
    "a scalar": (lambda: pair(p_weight_scale_inv=torch.tensor(1.0)), "1.weight_scale_inv", "one scale for the whole tensor"),
    "a scale in a list": (lambda: pair(p_weight_scale_inv=torch.ones(1)), "1.weight_scale_inv", "one scale for the whole tensor"),
    "per channel": (lambda: pair(p_weight_scale_inv=torch.ones(48, 1)), "1.weight_scale_inv", "one scale per channel"),
    "per channel, flat": (lambda: pair(p_weight_scale_inv=torch.ones(48)), "1.weight_scale_inv", "one scale per channel"),
    "per input": (lambda: pair(p_weight_scale_inv=torch.ones(1, 32)), "1.weight_scale_inv", "one scale per channel"),
    "per channel as a block": (lambda: pair(block=(1, 32)), "1.weight_scale_inv", "a scale per channel"),
    "transposed": (lambda: pair(p_weight_scale_inv=torch.ones(2, 3)), "1.weight_scale_inv", "transposed"),
    "another block": (lambda: pair(p_weight_scale_inv=torch.ones(6, 4)), "1.weight_scale_inv", "another shape"),
    "bfloat16 scales": (
        lambda: pair(p_weight_scale_inv=torch.ones(3, 2).bfloat16()),
        "1.weight_scale_inv",
        "torch.bfloat16, not float32",
    ),
    "ue8m0 scales": (
        lambda: pair(p_weight_scale_inv=torch.ones(3, 2).to(torch.float8_e8m0fnu)),
        "1.weight_scale_inv",
        "e8m0fnu, not float32",
    ),
    "integer scales": (lambda: pair(p_weight_scale_inv=ints(3, 2)), "1.weight_scale_inv", "not float32"),
    "a block larger than the weight": (lambda: pair(block=(64, 16)), "1.weight_scale_inv", "larger than the weight"),
    "fixed activations": (lambda: pair(p_input_scale=torch.ones(1)), "1.weight", "input_scale"),
    "e5m2": (lambda: pair(p_weight=torch.ones(48, 32).to(torch.float8_e5m2)), "1.weight", "only float8_e4m3fn"),
    "a vector": (lambda: pair(p_weight=float8(48)), "1.weight", "1 dimensions"),
    "packed integers beside it": (lambda: nn.Sequential(pair(), Holder(p_w=ints(4, 4))), "1.1.w", "integer parameter"),
    "four bits": (
        lambda: pair(p_weight=torch.zeros(48, 16, dtype=torch.int8)),
        "1.weight",
        "integer parameter",
    ),
    "scales without a weight": (lambda: Holder(scale_inv=torch.ones(4).to(torch.float8_e8m0fnu)), "1.scale_inv", "quantized dtype"),
    "a fused weight with the grid of the whole": (
        lambda: pair(
            p_weight=None,
            p_weight_scale_inv=None,
            p_gate_up_proj=float8(2, 48, 32),
            p_gate_up_proj_scale_inv=torch.ones(2, 3, 2),
        ),
        "1.gate_up_proj_scale_inv",
        "another shape",
    ),
    "experts with one scale each": (
        lambda: pair(
            p_weight=None,
            p_weight_scale_inv=None,
            p_down_proj=float8(4, 48, 32),
            p_down_proj_scale_inv=torch.ones(4),
        ),
        "1.down_proj_scale_inv",
        "one scale for the whole tensor",
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_anything_else_about_float8_is_refused_by_name(name: str) -> None:
    make, where, reason = UNSOUND[name]
    with pytest.raises(UnsupportedQuantizationError) as caught:
        check_tensors("fp8", nn.Sequential(BlockFP8Linear(16, 16, block_size=(16, 16)), make()))
    assert caught.value.module == where
    assert reason in str(caught.value)
    assert caught.value.verified == ("fp8", "unquantized")


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.filterwarnings("ignore")
def test_every_packed_layout_is_refused_in_an_fp8_model_too(name: str) -> None:
    with pytest.raises(UnsupportedQuantizationError):
        check_tensors("fp8", nn.Sequential(BlockFP8Linear(16, 16, block_size=(16, 16)), PACKED[name]()))


@pytest.mark.parametrize("method", ["unquantized", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.uint4, torch.int4, torch.uint2], ids=str)
def test_dtypes_of_less_than_a_byte_are_refused(dtype: torch.dtype, method: str) -> None:
    tree = nn.Sequential(BlockFP8Linear(16, 16, block_size=(16, 16))) if method == "fp8" else nn.Sequential(nn.Linear(2, 2))
    tree.append(Holder(p_codes=torch.empty(4, 4, dtype=torch.uint8).view(dtype)))
    with pytest.raises(UnsupportedQuantizationError) as caught:
        check_tensors(method, tree)
    assert caught.value.module == "1.codes"


def test_wrapper_subclasses_are_refused_in_an_fp8_model_too() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    module = pair(p_weight=None, a_weight=TwoTensor(float8(48, 32), float8(48, 32)))
    with pytest.raises(UnsupportedQuantizationError, match="TwoTensor"):
        check_tensors("fp8", nn.Sequential(BlockFP8Linear(16, 16, block_size=(16, 16)), module))


@pytest.mark.parametrize("name", PLAIN)
def test_ordinary_integer_buffers_pass_in_an_fp8_model_too(name: str) -> None:
    check_tensors("fp8", nn.Sequential(BlockFP8Linear(16, 16, block_size=(16, 16)), PLAIN[name]()))


def test_a_model_that_is_said_to_be_fp8_and_is_not() -> None:
    with pytest.raises(UnsupportedQuantizationError, match="none of its tensors is float8") as caught:
        check_tensors("fp8", nn.Linear(256, 256, dtype=torch.bfloat16), FP8)
    assert caught.value.method == "fp8"


def test_a_config_that_contradicts_the_tensors() -> None:
    layer = BlockFP8Linear(256, 256, block_size=(64, 64))
    check_tensors("fp8", layer, {**FP8, "weight_block_size": [64, 64]})
    with pytest.raises(UnsupportedQuantizationError, match="64 x 64, and the config says 128 x 128"):
        check_tensors("fp8", layer, FP8)
    nameless = pair(256, 256, (64, 64))
    del nameless.block_size
    check_tensors("fp8", nameless, {**FP8, "weight_block_size": [64, 64]})
    with pytest.raises(UnsupportedQuantizationError, match="another shape"):
        check_tensors("fp8", nameless, FP8)


def test_scales_fit_whatever_was_quantized() -> None:
    for shape, block in (((130, 70), (128, 64)), ((3, 40, 24), (16, 16)), ((17, 5), (4, 5))):
        weight, scales = quantize_block_fp8(torch.randn(shape), block)
        module = pair(p_weight=weight, p_weight_scale_inv=scales)
        module.block_size = block
        check_tensors("fp8", module)
