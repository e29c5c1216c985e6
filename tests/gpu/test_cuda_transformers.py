"""Transformers models and block FP8 on a GPU, from shards on disk to a second start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from support import fp8_models, gpu_worker, worker

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 8192}
LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 20, "num_attention_heads": 32, "vocab_size": 65536}
"""About 170 MiB and 8.7 GiB in bfloat16."""


def make_qwen3(here, *, folder, sizes, shard, device):
    """Random weights, made on the GPU, in shards."""
    import transformers as hf

    config = hf.Qwen3Config(**sizes, num_key_value_heads=sizes["num_attention_heads"] // 4, head_dim=128, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = hf.Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
    model.save_pretrained(folder, max_shard_size=shard)
    del model
    gpu_worker.free_nbytes(here)
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def load_plainly(here, *, cfg, name="model"):
    """What a user without torchwcache would do."""
    worker.load_without_us(here, cfg={"checkpoint": cfg["checkpoint"]}, name=name)
    here.models[name].to(cfg["device"]).eval()


def weights_of(picture):
    """Parameters by their bits."""
    return {path: facts[:4] for path, facts in picture["parameters"].items()}


def test_a_qwen3_starts_twice(workers, daemon, tmp_path, device):
    producer, client, plain = workers.several(3)
    cfg = {"checkpoint": str(tmp_path / "qwen3"), "device": device}
    nbytes = plain.do(make_qwen3, folder=cfg["checkpoint"], sizes=SMALL, shard="60MB", device=device)
    assert nbytes > 150 * MIB
    assert len(list(Path(cfg["checkpoint"]).glob("*.safetensors"))) > 2
    made, found = producer.do(gpu_worker.attach, cfg=cfg), client.do(gpu_worker.attach, cfg=cfg)
    assert (made["source"], made["published"], made["warnings"]) == ("disk", True, [])
    assert (found["source"], found["warnings"]) == ("cache", [])
    assert found["mapped_nbytes"] > 150 * MIB
    plain.do(gpu_worker.attach, cfg=cfg, mode="off")
    assert client.do(worker.picture) == producer.do(worker.picture) == plain.do(worker.picture)
    answer = plain.do(gpu_worker.output)
    assert producer.do(gpu_worker.output) == answer
    assert client.do(gpu_worker.output) == answer

    plain.do(load_plainly, cfg=cfg, name="plain")
    assert weights_of(plain.do(worker.picture, name="plain")) == weights_of(client.do(worker.picture))
    assert plain.do(gpu_worker.output, name="plain") == answer


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.environ.get("TORCHWCACHE_BIG") != "1", reason="TORCHWCACHE_BIG=1 runs it: 9 GiB on disk and on the GPU")
def test_a_large_qwen3_starts_twice(alone, workers, daemon, tmp_path, device):
    producer, client = workers.several(2)
    cfg = {"checkpoint": str(tmp_path / "qwen3"), "device": device}
    assert client.do(make_qwen3, folder=cfg["checkpoint"], sizes=LARGE, shard="2GB", device=device) > 8 << 30
    made = producer.do(gpu_worker.attach, cfg=cfg)
    assert (made["source"], made["published"], made["warnings"]) == ("disk", True, [])
    found = client.do(gpu_worker.attach, cfg=cfg)
    assert (found["source"], found["warnings"]) == ("cache", [])
    assert client.do(worker.picture) == producer.do(worker.picture)
    assert client.do(gpu_worker.output) == producer.do(gpu_worker.output)
    shutil.rmtree(cfg["checkpoint"])


# ---- block FP8 ---------------------------------------------------------------------------------------------------------------


def make_fp8(here, *, folder, kind):
    fp8_models.make_model(kind).save_pretrained(folder)
    fp8_models.quantize_folder(Path(folder), fp8_models.BLOCKS[kind])


@pytest.mark.parametrize("kind", ["qwen3_wide", "qwen3_moe"])
def test_an_fp8_checkpoint_is_attached_as_it_is(kind, workers, daemon, tmp_path, device):
    """Its bytes: Transformers' own modules need kernels from a hub to compute on a GPU."""
    producer, client, plain = workers.several(3)
    cfg = {"checkpoint": str(tmp_path / kind), "device": device}
    plain.do(make_fp8, folder=cfg["checkpoint"], kind=kind)
    made, found = producer.do(gpu_worker.attach, cfg=cfg), client.do(gpu_worker.attach, cfg=cfg)
    assert (made["source"], made["published"], found["source"]) == ("disk", True, "cache")
    plain.do(gpu_worker.attach, cfg=cfg, mode="off")
    state = plain.do(gpu_worker.state)
    assert {"torch.float8_e4m3fn", "torch.float32", "torch.bfloat16"} <= {facts[1] for facts in state.values()}
    assert producer.do(gpu_worker.state) == state
    assert client.do(gpu_worker.state) == state
    assert client.do(worker.picture) == producer.do(worker.picture) == plain.do(worker.picture)


def save_tower(here, *, path):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = fp8_models.Tower().state_dict()
    save_file({name: tensor for name, tensor in state.items() if not name.startswith(("again", "tied"))}, path)


def test_a_plain_module_quantized_at_load(workers, daemon, tmp_path, device):
    producer, client, plain = workers.several(3)
    path = str(tmp_path / "tower.safetensors")
    plain.do(save_tower, path=path)
    block = {"quantization": "fp8", "quantization_config": {"weight_block_size": [16, 16]}}
    cfg = {"checkpoint": path, "build": "support.fp8_models:Tower", "strict": False, "seed": 0, "device": device, **block}
    made, found = producer.do(gpu_worker.attach, cfg=cfg), client.do(gpu_worker.attach, cfg=cfg)
    assert (made["source"], made["published"], found["source"]) == ("disk", True, "cache")
    plain.do(gpu_worker.attach, cfg=cfg, mode="off")
    state = plain.do(gpu_worker.state)
    assert state["up.weight"][1] == "torch.float8_e4m3fn"
    assert client.do(gpu_worker.state) == producer.do(gpu_worker.state) == state
    assert client.do(gpu_worker.output) == producer.do(gpu_worker.output) == plain.do(gpu_worker.output)
    assert client.do(gpu_worker.protections)["up.weight"] == "r"
