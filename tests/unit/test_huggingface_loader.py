"""The Transformers loader: from_pretrained's result, the files it opens, and an error for everything that can be wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from torchwcache.adapter import LoadContext, LoadResult  # noqa: E402
from torchwcache.config import ModelConfig  # noqa: E402
from torchwcache.errors import (  # noqa: E402
    BuildError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StateDictError,
)
from torchwcache.identity.checkpoint import hash_files  # noqa: E402
from torchwcache.loaders.huggingface import HuggingFaceLoader  # noqa: E402
from torchwcache.module import construct  # noqa: E402

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
CONTEXT = LoadContext(
    allocate=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8),
    expect=lambda sizes: None,
    read_file=lambda *_: None,
    progress=lambda *_: None,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def loader() -> HuggingFaceLoader:
    return HuggingFaceLoader()


def load(folder: Path, **kwargs: Any) -> LoadResult:
    return HuggingFaceLoader().load(ModelConfig(folder, **kwargs), CONTEXT)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


# ---- loading and building ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_it_loads_what_from_pretrained_loads(folder: Path, dtype: str | None) -> None:
    result = load(folder, dtype=dtype)
    plain = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    ids = torch.tensor([[1, 2, 3]])
    assert type(result.module) is type(plain)
    assert result.module.dtype == plain.dtype
    assert torch.equal(result.module(ids).logits, plain(ids).logits)
    assert not result.module.training
    assert (result.initialized, result.notes) == ([], [])


ENCODER = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
MODELS = {
    "llama": lambda: llama(),
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "qwen3 moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
    ),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**ENCODER, vocab_size=32)),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**ENCODER, image_size=16, patch_size=8)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=32)
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
    ),
}
MARKS = {"_parameters", "_buffers", "_modules", "_weight_conversions", "generation_config", "_load_state_dict_pre_hooks"}
"""Compared otherwise (tensors, by name), read by every client for itself, or numbered by the process (hooks)."""


def attributes(module: nn.Module) -> dict[str, str]:
    return {
        f"{path}.{name}": repr(value)
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if name not in MARKS
    }


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_build_without_weights_is_the_same_module(
    tmp_path: Path, loader: HuggingFaceLoader, name: str, dtype: str | None
) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    cfg = ModelConfig(tmp_path, dtype=dtype)
    loaded = loader.load(cfg, CONTEXT).module
    with construct.parameters_on_meta():
        built = loader.build_module(cfg)
    assert attributes(built) == attributes(loaded)
    assert all(parameter.is_meta for parameter in built.parameters())
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(module, kind)(remove_duplicate=False)) for module in (built, loaded))
        assert {key: (value.shape, value.dtype) for key, value in ours.items()} == {
            key: (value.shape, value.dtype) for key, value in theirs.items()
        }


@pytest.mark.parametrize("where", ["config", "index", "weights"])
def test_the_checkpoints_own_dtype_is_found(tmp_path: Path, loader: HuggingFaceLoader, where: str) -> None:
    llama().to(torch.float16).save_pretrained(tmp_path, max_shard_size="4KB" if where == "index" else "1GB")
    if where != "config":
        edit_config(tmp_path, dtype=..., torch_dtype=...)
    if where == "index":
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["metadata"]["dtype"] = "float16"
        path.write_text(json.dumps(index))
    cfg = ModelConfig(tmp_path)
    with construct.parameters_on_meta():
        assert loader.build_module(cfg).dtype == torch.float16
    assert loader.load(cfg, CONTEXT).module.dtype == torch.float16


def test_attention_implementation_and_class_can_be_chosen(folder: Path, loader: HuggingFaceLoader) -> None:
    cfg = ModelConfig(folder, build_kwargs={"attn_implementation": "eager"}, build="transformers:LlamaModel")
    result = loader.load(cfg, CONTEXT)
    assert type(result.module).__name__ == "LlamaModel"
    with construct.parameters_on_meta():
        built = loader.build_module(cfg)
    assert built.config._attn_implementation == result.module.config._attn_implementation == "eager"
    assert "lm_head.weight" in result.notes[0]  # not used, said so, tolerated


def test_arguments_that_would_open_other_files_are_refused(folder: Path) -> None:
    for name in ("subfolder", "variant", "gguf_file", "state_dict", "device_map", "dtype"):
        with pytest.raises(ConfigError, match=name):
            load(folder, build_kwargs={name: "x"})


# ---- D4 ----------------------------------------------------------------------------------------------------------------------


def drop_head(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_newly_initialized_tensors_are_listed_and_seeded(folder: Path) -> None:
    drop_head(folder)
    assert load(folder).initialized == ["lm_head.weight"]
    one, two = (load(folder, seed=5).module.lm_head.weight for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, load(folder, seed=6).module.lm_head.weight)


def test_mismatched_shapes_are_an_error_unless_asked_for(folder: Path) -> None:
    edit_config(folder, vocab_size=40)
    with pytest.raises(StateDictError, match="does not fit LlamaForCausalLM"):
        load(folder)
    result = load(folder, build_kwargs={"ignore_mismatched_sizes": True})
    assert set(result.initialized) == {"lm_head.weight", "model.embed_tokens.weight"}


# ---- files -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Names of all files that are opened, by way of an audit hook (which cannot be removed, only silenced)."""
    names: list[str] = []
    on = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if on and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            names.append(os.fsdecode(arguments[0]))

    sys.addaudithook(hook)
    yield names
    on.clear()


def test_files_are_what_from_pretrained_opens(tmp_path: Path, loader: HuggingFaceLoader, opened: list[str]) -> None:
    folder = tmp_path / "model"
    llama().save_pretrained(folder, max_shard_size="4KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "other.safetensors").write_bytes(b"not used")
    files = {name for name, _ in loader.files(ModelConfig(folder)).files}
    assert {"config.json", "model.safetensors.index.json"} < files
    assert not {"generation_config.json", "tokenizer.json", "other.safetensors"} & files
    opened.clear()
    transformers.LlamaForCausalLM.from_pretrained(folder)
    by_python = {Path(name).name for name in opened if str(folder) in name}
    assert by_python - {"generation_config.json"} <= files


def test_identity_ignores_what_is_not_weights(folder: Path, loader: HuggingFaceLoader) -> None:
    before = hash_files(loader.files(ModelConfig(folder)))
    (folder / "generation_config.json").write_text('{"temperature": 2.0}')
    assert hash_files(loader.files(ModelConfig(folder))) == before
    edit_config(folder, rms_norm_eps=1e-3)
    assert hash_files(loader.files(ModelConfig(folder))) != before


def break_checkpoint(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    match how:
        case "no folder":
            folder.rename(folder.with_name("moved"))
        case "no config":
            (folder / "config.json").unlink()
        case "config not json":
            (folder / "config.json").write_text("{")
        case "no weights":
            weights.unlink()
        case "pickle":
            weights.rename(folder / "pytorch_model.bin")
        case "truncated":
            os.truncate(weights, weights.stat().st_size - 1)
        case "corrupt":
            weights.write_bytes(b"\xff" * 1000)
        case "missing shard":
            weights.unlink()
            index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        case "unknown architecture":
            edit_config(folder, architectures=["NoSuchModel"])
        case "not a model":
            edit_config(folder, architectures=["LlamaConfig"])
        case "no architecture":
            edit_config(folder, architectures=...)
        case "unknown model type":
            edit_config(folder, model_type="no_such_type")
        case "no model type":
            edit_config(folder, model_type=...)
        case "untrusted code":
            edit_config(folder, architectures=["Mine"], auto_map={"AutoModelForCausalLM": "mine.Mine"})


@pytest.mark.parametrize(
    ("how", "error", "named"),
    [
        ("no folder", CheckpointNotFoundError, "no such folder"),
        ("no config", CheckpointNotFoundError, "config.json"),
        ("config not json", CorruptCheckpointError, "config.json"),
        ("no weights", CheckpointNotFoundError, "model.safetensors"),
        ("pickle", CheckpointError, "save_pretrained"),
        ("truncated", CorruptCheckpointError, "model.safetensors"),
        ("corrupt", CorruptCheckpointError, "model.safetensors"),
        ("missing shard", CheckpointNotFoundError, "model-00001-of-00002.safetensors"),
        ("unknown architecture", BuildError, "NoSuchModel"),
        ("not a model", BuildError, "pass build="),
        ("no architecture", BuildError, "build="),
        ("unknown model type", BuildError, "no_such_type"),
        ("no model type", BuildError, "model type None"),
        ("untrusted code", BuildError, "trust_remote_code=True"),
    ],
)
def test_broken_checkpoints_each_have_their_error(folder: Path, how: str, error: type[Exception], named: str) -> None:
    break_checkpoint(folder, how)
    with pytest.raises(error) as caught:
        load(folder)
    assert named in str(caught.value)


# ---- overrides ---------------------------------------------------------------------------------------------------------------


def test_overrides_reach_the_model(folder: Path, loader: HuggingFaceLoader) -> None:
    cfg = ModelConfig(folder, overrides={"rope_theta": 77.0, "rms_norm_eps": 0.5})
    assert loader.config(ModelConfig(folder)).rope_parameters["rope_theta"] == 10000.0
    assert loader.config(cfg).rope_parameters == {"rope_theta": 77.0, "rope_type": "default"}
    module = loader.load(cfg, CONTEXT).module
    assert module.model.norm.variance_epsilon == 0.5
    plain = load(folder).module
    assert not torch.equal(module.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("name", ["rms_norm_epsilon", "no_such_field"])
def test_an_override_that_changes_nothing_is_an_error(folder: Path, loader: HuggingFaceLoader, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"overrides\.{name}: LlamaConfig has no such field"):
        loader.config(ModelConfig(folder, overrides={name: 1}))


def test_rope_of_each_layer_type_is_not_guessed(tmp_path: Path, loader: HuggingFaceLoader) -> None:
    transformers.Gemma3TextConfig(**SIZES, architectures=["Gemma3ForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="each layer type"):
        loader.config(ModelConfig(tmp_path, overrides={"rope_theta": 1.0}))


def test_nested_overrides_are_merged(tmp_path: Path, loader: HuggingFaceLoader) -> None:
    transformers.LlavaConfig(text_config=transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    config = loader.config(ModelConfig(tmp_path, overrides={"text_config": {"rms_norm_eps": 0.25}}))
    assert config.text_config.rms_norm_eps == 0.25
    assert config.text_config.hidden_size == SIZES["hidden_size"]
    with pytest.raises(ConfigError, match=r"overrides\.text_config\.nonsense"):
        loader.config(ModelConfig(tmp_path, overrides={"text_config": {"nonsense": 1}}))


# ---- quantization ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"compression_config": {"quant_method": "gptq"}},
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
    ],
)
def test_the_stated_quantization_is_found(folder: Path, loader: HuggingFaceLoader, changes: dict[str, Any]) -> None:
    assert loader.quantization_config(ModelConfig(folder)) is None
    edit_config(folder, **changes)
    assert loader.quantization_config(ModelConfig(folder)) == {"quant_method": "gptq"}


def test_quantization_on_load_is_found_too(folder: Path, loader: HuggingFaceLoader) -> None:
    asked = transformers.BitsAndBytesConfig(load_in_8bit=True)
    found = loader.quantization_config(ModelConfig(folder, build_kwargs={"quantization_config": asked}))
    assert found is not None
    assert found["load_in_8bit"]


# ---- the checkpoint's own code, and the hub's cache --------------------------------------------------------------------------

REMOTE = """
from transformers import LlamaForCausalLM
class Mine(LlamaForCausalLM):
    marker = 1
"""


def test_own_code_is_run_only_when_trusted_and_is_part_of_the_identity(
    folder: Path, loader: HuggingFaceLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    edit_config(folder, architectures=["Mine"], auto_map={"AutoModelForCausalLM": "mine.Mine"})
    (folder / "mine.py").write_text(REMOTE)
    cfg = ModelConfig(folder, trust_remote_code=True)
    module = loader.load(cfg, CONTEXT).module
    assert (type(module).__name__, type(module).marker) == ("Mine", 1)
    assert "mine.py" in [name for name, _ in loader.files(cfg).files]
    assert "mine.py" not in [name for name, _ in loader.files(ModelConfig(folder)).files]
    before = hash_files(loader.files(cfg))
    (folder / "mine.py").write_text(REMOTE.replace("= 1", "= 2"))
    assert hash_files(loader.files(cfg)) != before


def test_a_repo_id_is_found_in_the_cache(folder: Path, loader: HuggingFaceLoader, tmp_path: Path) -> None:
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--someone--llama"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    for path in folder.iterdir():
        (repo / "blobs" / path.name).write_bytes(path.read_bytes())
        (repo / "snapshots" / commit / path.name).symlink_to(repo / "blobs" / path.name)
    for revision in (None, commit):
        cfg = ModelConfig("someone/llama", revision=revision)
        assert hash_files(loader.files(cfg)) == hash_files(loader.files(ModelConfig(folder)))
        assert torch.equal(loader.load(cfg, CONTEXT).module.lm_head.weight, load(folder).module.lm_head.weight)


@pytest.mark.parametrize("name", ["someone/nothing", "not a repo id", "nothing"])
def test_a_repo_id_that_is_nowhere_says_so(loader: HuggingFaceLoader, name: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"neither a local folder nor a repo") as caught:
        loader.files(ModelConfig(name))
    assert caught.value.__cause__ is not None
