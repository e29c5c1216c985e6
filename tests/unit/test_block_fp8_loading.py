"""Which layers become block FP8, and how the loaders come to know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import fp8_models
from torch import nn

from torchwcache.adapter import LoadContext
from torchwcache.config import ModelConfig
from torchwcache.errors import ConfigError, StateDictError, UnsupportedQuantizationError
from torchwcache.identity.environment import environment_stamp
from torchwcache.identity.fingerprint import diff, fingerprint_of
from torchwcache.loaders.huggingface import HuggingFaceLoader
from torchwcache.quantization import block_fp8_config
from torchwcache.quantization.block_fp8_config import BlockFP8Settings, requested_settings
from torchwcache.quantization.block_fp8_layers import BlockFP8Linear
from torchwcache.quantization.block_fp8_replace import is_left_out, quantize_linears
from torchwcache_nn import NNAdapter

transformers = pytest.importorskip("transformers")

B16 = (16, 16)
STATED = {"quant_method": "fp8", "weight_block_size": [16, 16]}


def read_file(fd: int, offset: int, tensor: torch.Tensor) -> None:
    import os

    data = os.pread(fd, tensor.numel() * tensor.element_size(), offset)
    tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


CONTEXT = LoadContext(
    allocate=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8),
    expect=lambda sizes: None,
    read_file=read_file,
    progress=lambda done, total: None,
)


def settings(block: tuple[int, int] = B16, left_out: tuple[str, ...] | None = None) -> BlockFP8Settings:
    return BlockFP8Settings(block=block, left_out=left_out, at_load=True)


def chosen(module: nn.Module, **options: Any) -> list[str]:
    quantize_linears(module, settings(**options))
    return [path for path, child in module.named_modules() if isinstance(child, BlockFP8Linear)]


# ---- which layers ------------------------------------------------------------------------------------------------------------


def test_the_usual_layers_are_chosen_on_meta_as_in_memory() -> None:
    with torch.device("meta"):
        meta = fp8_models.Tower()
    real = fp8_models.Tower()
    assert chosen(real) == chosen(meta) == ["up", "down"]
    assert real.again is real.down
    assert meta.again is meta.down
    facts = [(name, p.shape, p.dtype) for name, p in real.named_parameters()]
    assert facts == [(name, p.shape, p.dtype) for name, p in meta.named_parameters()]
    assert real.tied.weight is real.embed.weight


@pytest.mark.parametrize("head", ["lm_head", "head", "classifier", "score"])
def test_heads_stay_wherever_they_are(head: str) -> None:
    module = nn.ModuleDict({"body": nn.Linear(32, 32), head: nn.Linear(32, 32), "last": nn.Linear(32, 32)})
    assert chosen(module) == ["body"]


def test_who_names_layers_decides_alone() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(32, 32) for name in ("a", "lm_head", "last")})

    assert chosen(make(), left_out=()) == ["a", "lm_head", "last"]
    assert chosen(make(), left_out=("a",)) == ["lm_head", "last"]
    assert isinstance(quantize_linears(nn.Linear(32, 32), settings(left_out=())), BlockFP8Linear)


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.1.mlp", "model.layers.1", True),
        ("model.layers.11.mlp", "model.layers.1", False),
        ("model.layers.3.mlp.gate", "mlp.gate", True),
        ("model.layers.3.mlp.gate_proj", "mlp.gate", False),
        ("model.layers.3.mlp.gate", "model.layers.*.gate", True),
        ("lm_head", "lm_head", True),
        ("decoder.lm_head", "lm_head", True),
    ],
)
def test_patterns_mean_what_they_mean_to_transformers(name: str, pattern: str, expected: bool) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    assert is_left_out(name, [pattern]) is expected
    assert should_convert_module(name, [pattern]) is not expected


def unusual(kind: str) -> nn.Module:
    layer: nn.Module = nn.Linear(32, 32)
    match kind:
        case "subclass":
            layer = type("MyLinear", (nn.Linear,), {})(32, 32)
        case "hook":
            layer.register_forward_hook(lambda module, args, output: output)
        case "forward":
            layer.forward = lambda x: x  # type: ignore[method-assign]
        case "float64":
            layer = layer.double()
        case "small":
            layer = nn.Linear(32, 8)
        case "parametrized":
            layer = nn.utils.parametrizations.weight_norm(layer)
        case "float8":
            return nn.Sequential(BlockFP8Linear(32, 32, block_size=B16), layer)
    return layer


@pytest.mark.parametrize("kind", ["subclass", "hook", "forward", "float64", "small", "parametrized"])
def test_unusual_layers_stay(kind: str) -> None:
    assert chosen(nn.Sequential(unusual(kind), nn.Linear(32, 32)), left_out=()) == ["1"]


def test_viewed_weights_stay() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    module.top = module[0].weight[:2]
    assert chosen(module, left_out=()) == ["1"]


def test_a_module_that_is_built_quantized_stays_as_it_is() -> None:
    module = nn.Sequential(unusual("float8"), nn.Linear(32, 32))
    assert chosen(module, left_out=()) == ["0.0"]


def test_attributes_of_a_layer_go_along() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    module[0].role = "query"
    module.eval()
    quantize_linears(module, settings())
    assert module[0].role == "query"
    assert not module[0].training


# ---- what is asked for -------------------------------------------------------------------------------------------------------


def test_what_a_config_comes_to() -> None:
    plain = ModelConfig("x")
    assert requested_settings(plain, None) is None
    assert requested_settings(plain, {"quant_method": "gptq"}) is None
    assert requested_settings(ModelConfig("x", quantization="unquantized"), STATED) is None
    assert requested_settings(plain, STATED) == BlockFP8Settings(block=B16, left_out=None)
    assert requested_settings(ModelConfig("x", quantization="fp8"), STATED) == BlockFP8Settings(block=B16, left_out=None)
    usual = requested_settings(ModelConfig("x", quantization="fp8"), None)
    assert usual == BlockFP8Settings(block=(128, 128), left_out=None, at_load=True)
    asked = ModelConfig("x", quantization="fp8", quantization_config={"modules_to_not_convert": ["a"]})
    assert requested_settings(asked, None) == BlockFP8Settings(block=(128, 128), left_out=("a",), at_load=True)
    assert block_fp8_config.METHOD == "fp8"


@pytest.mark.parametrize(
    "asked",
    [
        {"weight_block_size": (0, 1)},
        {"weight_block_size": (1, -1)},
        {"weight_block_size": None},
        {"activation_scheme": "static"},
        {"modules_to_not_convert": [1]},
        {"modules_to_not_convert": "a"},
        {"modules_to_not_convert": ["("]},
        {"bits": 8},
    ],
)
def test_wrong_wishes_are_config_errors(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        requested_settings(ModelConfig("x", quantization="fp8", quantization_config=asked), None)


def test_wishes_need_a_method() -> None:
    with pytest.raises(ConfigError, match="quantization="):
        ModelConfig("x", quantization_config={"weight_block_size": (16, 16)})


# ---- Transformers ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    for name in ("bf16", "fp8"):
        fp8_models.make_model("qwen3").save_pretrained(folder / name)
    fp8_models.quantize_folder(folder / "fp8", B16)
    return folder


def test_both_ways_come_to_the_same_tensors(checkpoints: Path) -> None:
    loader = HuggingFaceLoader()
    at_load = ModelConfig(checkpoints / "bf16", quantization="fp8", quantization_config={"weight_block_size": B16})
    kwargs = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    as_in_transformers = ModelConfig(checkpoints / "bf16", build_kwargs=kwargs)
    states = [
        loader.load(cfg, CONTEXT).module.state_dict() for cfg in (ModelConfig(checkpoints / "fp8"), at_load, as_in_transformers)
    ]
    on_disk = load_file(checkpoints / "fp8" / "model.safetensors")
    for state in states:
        assert state.keys() == on_disk.keys()
        for name, tensor in on_disk.items():
            assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_the_build_makes_what_the_load_makes(checkpoints: Path) -> None:
    loader = HuggingFaceLoader()
    cfg = ModelConfig(checkpoints / "fp8")
    with torch.device("meta"):
        built = loader.build_module(cfg)
    loaded = loader.load(cfg, CONTEXT).module
    facts = [(name, p.shape, p.dtype) for name, p in loaded.named_parameters()]
    assert facts == [(name, p.shape, p.dtype) for name, p in built.named_parameters()]
    for model in (built, loaded):
        assert model.config.quantization_config.quant_method == "fp8"
        assert model.config.quantization_config.weight_block_size == [16, 16]
        assert (model.quantization_method, model.is_quantized) == ("fp8", True)


def test_on_a_gpu_transformers_own_modules_are_used(checkpoints: Path) -> None:
    """As far as this can be seen without one: the meta build."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    loader = HuggingFaceLoader()
    for cfg in (
        ModelConfig(checkpoints / "fp8", device="cuda"),
        ModelConfig(checkpoints / "bf16", device="cuda", quantization="fp8", quantization_config={"weight_block_size": B16}),
    ):
        with torch.device("meta"):
            built = loader.build_module(cfg)
        assert type(built.model.layers[0].mlp.up_proj) is FP8Linear
        assert built.model.layers[0].mlp.up_proj.weight_scale_inv.shape == (5, 3)


def test_a_checkpoint_that_belies_its_config_is_loaded_as_transformers_does(tmp_path: Path) -> None:
    fp8_models.make_model("qwen3").save_pretrained(tmp_path)
    fp8_models.edit_config(tmp_path, quantization_config=STATED)
    result = HuggingFaceLoader().load(ModelConfig(tmp_path), CONTEXT)
    assert {parameter.dtype for parameter in result.module.parameters()} == {torch.bfloat16}
    assert any("no tensor of the checkpoint is float8" in note for note in result.notes)


def test_missing_scales_are_an_error_that_names_them(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints / "fp8" / "config.json").read_bytes())
    tensors = load_file(checkpoints / "fp8" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StateDictError, match=r"no scales: model\.layers\.0\.mlp\.up_proj\.weight\.") as caught:
        HuggingFaceLoader().load(ModelConfig(tmp_path), CONTEXT)
    assert caught.value.missing == ("model.layers.0.mlp.up_proj.weight_scale_inv",)


def test_experts_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"], "num_hidden_layers": 1}
    config = transformers.GptOssConfig(**{**fp8_models.SMALL, **sizes})
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    cfg = ModelConfig(tmp_path, quantization="fp8", quantization_config={"weight_block_size": B16})
    with torch.device("meta"), pytest.raises(UnsupportedQuantizationError, match="GptOssExperts") as caught:
        HuggingFaceLoader().build_module(cfg)
    assert caught.value.module == "model.layers.0.mlp.experts"
    with pytest.raises(UnsupportedQuantizationError, match="GptOssExperts"):
        HuggingFaceLoader().load(cfg, CONTEXT)


def test_what_is_not_ours_to_run_is_loaded_as_transformers_does(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchwcache.loaders import huggingface_fp8

    def refuse(*args: Any) -> None:
        raise huggingface_fp8.refuse("fp8", "model.layers.0", "for this test")

    monkeypatch.setattr(huggingface_fp8, "_counterpart", refuse)
    folder = checkpoints / "even"
    fp8_models.make_model("qwen3_even").save_pretrained(folder)
    fp8_models.quantize_folder(folder, B16)
    result = HuggingFaceLoader().load(ModelConfig(folder), CONTEXT)
    assert {parameter.dtype for parameter in result.module.parameters()} == {torch.bfloat16}
    assert any("for this test" in note for note in result.notes)


def test_two_wishes_are_one_too_many(checkpoints: Path) -> None:
    cfg = ModelConfig(
        checkpoints / "bf16",
        quantization="fp8",
        quantization_config={"weight_block_size": B16},
        build_kwargs={"quantization_config": STATED},
    )
    with pytest.raises(ConfigError, match="not both"):
        HuggingFaceLoader().settings(cfg)


# ---- identity ----------------------------------------------------------------------------------------------------------------


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    adapter = NNAdapter()
    found = []
    for cfg in (one, other):
        description = adapter.describe(cfg, adapter.build(cfg)[0])
        method = "fp8" if adapter._settings(cfg, adapter.loader(cfg)) is not None else "unquantized"
        found.append(
            fingerprint_of(
                cfg,
                description,
                environment_stamp("cpu", computes=description.computes),
                content=("full", "0" * 32),
                variant=None,
                loader=description.loader,
                adapter=adapter,
                quantization=method,
            )
        )
    return [difference.path for difference in diff(*found)]


def test_method_block_and_exceptions_are_part_of_the_identity(checkpoints: Path) -> None:
    def at_load(**asked: Any) -> ModelConfig:
        return ModelConfig(checkpoints / "bf16", quantization="fp8", quantization_config={"weight_block_size": B16, **asked})

    assert differences(at_load(), at_load(weight_block_size=[16, 16])) == []
    assert "model.quantization.block" in differences(at_load(), at_load(weight_block_size=(8, 8)))
    assert "model.quantization.left_out" in differences(at_load(), at_load(modules_to_not_convert=["lm_head"]))
    found = differences(at_load(), ModelConfig(checkpoints / "bf16"))
    assert "quantization.method" in found
    assert "model.quantization" in found
    assert "environment.flags.flush_denormal" in found


def test_a_stated_config_is_part_of_the_identity(checkpoints: Path, tmp_path: Path) -> None:
    for name, left_out in (("one", ["lm_head"]), ("two", ["lm_head", "model.layers.0"])):
        (tmp_path / name).mkdir()
        for path in (checkpoints / "fp8").iterdir():
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
        fp8_models.edit_config(tmp_path / name, quantization_config={**STATED, "modules_to_not_convert": left_out})
    found = differences(ModelConfig(tmp_path / "one"), ModelConfig(tmp_path / "two"))
    assert "quantization.config.modules_to_not_convert" in found
    assert json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"] == [
        "lm_head"
    ]
