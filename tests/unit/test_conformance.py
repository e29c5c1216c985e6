"""Our own plugins under the suites that third parties subclass; and the suites can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from torchwcache.adapter import LoadContext, LoadResult
from torchwcache.config import ModelConfig
from torchwcache.loaders.base import Loader
from torchwcache.loaders.huggingface import HuggingFaceLoader
from torchwcache.loaders.safetensors import SafetensorsLoader
from torchwcache.memory.select import memory_for
from torchwcache.quantization.block_fp8_layers import BlockFP8Experts, BlockFP8Linear
from torchwcache.quantization.block_fp8_method import BlockFP8
from torchwcache.quantization.unquantized import Unquantized
from torchwcache.testing import AdapterConformance, LoaderConformance, QuantizationConformance
from torchwcache_nn import NNAdapter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("rope", torch.arange(4.0), persistent=False)
        self.top = self.embed.weight[:2]


def fuse(module: nn.Module) -> None:
    module.fused = module.head.weight.data.t().contiguous()
    module.ready = True


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))


@pytest.fixture
def plain(tmp_path: Path) -> ModelConfig:
    module = Net()
    save_file({name: t.clone() for name, t in module.state_dict().items() if name != "head.weight"}, tmp_path / "model.safetensors")
    return ModelConfig(tmp_path / "model.safetensors", build=Net, finalize=fuse)


@pytest.fixture
def llama(tmp_path: Path) -> ModelConfig:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return ModelConfig(tmp_path)


class TestPlainModules(AdapterConformance):
    @pytest.fixture
    def adapter(self) -> NNAdapter:
        return NNAdapter()

    @pytest.fixture
    def cfg(self, plain: ModelConfig) -> ModelConfig:
        return plain


class TestTransformers(AdapterConformance):
    @pytest.fixture
    def adapter(self) -> NNAdapter:
        return NNAdapter()

    @pytest.fixture
    def cfg(self, llama: ModelConfig) -> ModelConfig:
        return llama


class TestSafetensorsLoader(LoaderConformance):
    @pytest.fixture
    def loader(self) -> Loader:
        return SafetensorsLoader()

    @pytest.fixture
    def cfg(self, plain: ModelConfig) -> ModelConfig:
        return plain


class TestHuggingFaceLoader(LoaderConformance):
    @pytest.fixture
    def loader(self) -> Loader:
        return HuggingFaceLoader()

    @pytest.fixture
    def cfg(self, llama: ModelConfig) -> ModelConfig:
        return llama


class TestUnquantized(QuantizationConformance):
    @pytest.fixture
    def method(self) -> Unquantized:
        return Unquantized()

    @pytest.fixture
    def stated(self) -> None:
        return None

    @pytest.fixture
    def sound(self) -> nn.Module:
        return Net()

    @pytest.fixture
    def unsound(self) -> list[nn.Module]:
        packed, scaled = nn.Module(), nn.Linear(2, 2)
        packed.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
        scaled.weight = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
        return [packed, scaled]


class TestBlockFP8(QuantizationConformance):
    @pytest.fixture
    def method(self) -> BlockFP8:
        return BlockFP8()

    @pytest.fixture
    def stated(self) -> dict[str, Any]:
        return {"quant_method": "fp8", "weight_block_size": [16, 16]}

    @pytest.fixture
    def sound(self) -> nn.Module:
        experts = BlockFP8Experts(2, 24, 40, nn.SiLU(), block_size=(16, 16))
        return nn.Sequential(BlockFP8Linear(24, 40, block_size=(16, 16)), experts, nn.Linear(4, 4))

    @pytest.fixture
    def unsound(self) -> list[nn.Module]:
        def changed(**scales: torch.Tensor | None) -> nn.Module:
            layer = BlockFP8Linear(24, 40, block_size=(16, 16))
            for name, tensor in scales.items():
                setattr(layer, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
            return layer

        return [
            nn.Linear(2, 2),
            changed(weight_scale_inv=None),
            changed(weight_scale_inv=torch.ones(2, 3)),
            changed(weight_scale_inv=torch.ones(40, 1)),
            changed(weight_scale_inv=torch.tensor(1.0)),
            changed(weight_scale_inv=torch.ones(3, 2, dtype=torch.float16)),
            changed(weight=torch.ones(40, 24, dtype=torch.int8)),
        ]


class TestQuantizedPlainModules(AdapterConformance):
    @pytest.fixture
    def adapter(self) -> NNAdapter:
        return NNAdapter()

    @pytest.fixture
    def cfg(self, tmp_path: Path) -> ModelConfig:
        module = two_layers()
        save_file(module.state_dict(), tmp_path / "model.safetensors")
        asked = {"weight_block_size": (8, 8), "modules_to_not_convert": ["1"]}
        return ModelConfig(tmp_path / "model.safetensors", build=two_layers, quantization="fp8", quantization_config=asked)


class TestQuantizedTransformers(AdapterConformance):
    @pytest.fixture
    def adapter(self) -> NNAdapter:
        return NNAdapter()

    @pytest.fixture
    def cfg(self, llama: ModelConfig) -> ModelConfig:
        return ModelConfig(llama.checkpoint, quantization="fp8", quantization_config={"weight_block_size": (8, 8)})


# ---- the suites can fail -----------------------------------------------------------------------------------------------------


class RandomLoader(SafetensorsLoader):
    def load(self, cfg: ModelConfig, context: LoadContext) -> LoadResult:
        result = super().load(cfg, context)
        with torch.no_grad():
            result.module.embed.weight.add_(torch.rand(1))
        return result


class NosyLoader(SafetensorsLoader):
    def load(self, cfg: ModelConfig, context: LoadContext) -> LoadResult:
        (Path(cfg.checkpoint).parent / "extra.safetensors").write_bytes(b"")
        return super().load(cfg, context)


@pytest.mark.parametrize(
    ("loader", "test"),
    [
        (RandomLoader(), LoaderConformance.test_a_load_is_a_function_of_the_files),
        (NosyLoader(), LoaderConformance.test_it_opens_no_file_that_it_does_not_name),
    ],
)
def test_a_bad_loader_is_caught(loader: Loader, test: Any, plain: ModelConfig) -> None:
    with pytest.raises(AssertionError):
        test(LoaderConformance(), loader, plain)


def test_a_method_that_accepts_everything_is_caught() -> None:
    class Lax(Unquantized):
        def accepts(self, quantization_config: object) -> bool:
            return True

        def check_tensors(self, module: nn.Module) -> None:
            pass

    with pytest.raises(AssertionError):
        QuantizationConformance().test_it_accepts_its_own_config_and_no_other(Lax(), None)
    with pytest.raises(pytest.fail.Exception):
        QuantizationConformance().test_it_refuses_unsound_tensors(Lax(), [nn.Linear(1, 1)])


def test_an_adapter_that_loses_state_is_caught(plain: ModelConfig) -> None:
    class Lossy(NNAdapter):
        calls = 0

        def prepare(self, cfg: ModelConfig, module: nn.Module) -> None:
            Lossy.calls += 1
            module.calls = Lossy.calls

    suite = AdapterConformance()
    with pytest.raises(AssertionError):
        suite.test_what_is_attached_is_what_was_loaded(Lossy(), plain, memory_for("cpu"))
