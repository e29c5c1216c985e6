"""Block FP8 across processes: attached is as loaded, to the last bit, and nothing is ever quantized twice."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path

import pytest
from support import fp8_models, worker
from support.fp8_models import BLOCKS
from support.saved_models import save_pretrained, saved, verified

FP8 = "fp8"


def make_checkpoints(here, *, folder):
    """Each model three times: in bfloat16, quantized, and dequantized again."""
    for kind, block in BLOCKS.items():
        plain = Path(folder) / kind / "bf16"
        fp8_models.make_model(kind).save_pretrained(plain)
        quantized = shutil.copytree(plain, Path(folder) / kind / "fp8")
        fp8_models.quantize_folder(quantized, block)
        again = shutil.copytree(quantized, Path(folder) / kind / "dequantized")
        fp8_models.dequantize_folder(again, block)


def save_plain(here, *, path, build, seed=0, quantize_from=None):
    """A plain module's checkpoint; quantized from another's, where one is given."""
    import torch
    from safetensors.torch import load_file, save_file

    from torchwcache.quantization.block_fp8 import quantize_block_fp8

    torch.manual_seed(seed)
    state = {
        name: tensor for name, tensor in worker.resolve(build)().state_dict().items() if not name.startswith(("again", "tied"))
    }
    if quantize_from is not None:
        state = load_file(quantize_from)
        for name in ("up.weight", "down.weight"):
            state[name], state[f"{name}_scale_inv"] = quantize_block_fp8(state[name], (16, 16))
    save_file(state, path)


@pytest.fixture(scope="session")
def checkpoints(worker_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    maker = worker_pool.take()
    maker.do(make_checkpoints, folder=str(folder))
    worker_pool.give_back(maker)
    return folder


def count_quantizing(here):
    """From now on count how often a weight is quantized in this process."""
    from torchwcache.quantization import block_fp8

    original = block_fp8.quantize_block_fp8
    # An object of the standard library's: the state of one of our own would be part of the identity of the code that refers to it.
    calls = here.kept["quantized"] = types.SimpleNamespace(number=0)

    def counted(*args, **kwargs):
        calls.number += 1
        return original(*args, **kwargs)

    here.patch(block_fp8, "quantize_block_fp8", counted)


def counted(here):
    return here.kept["quantized"].number


def kinds_of_layers(here, *, name="model"):
    module = here.models[name]
    found = {}
    for path, child in module.named_modules():
        found.setdefault(type(child).__name__, []).append(path)
    dtypes = {path: str(parameter.dtype).removeprefix("torch.") for path, parameter in module.named_parameters()}
    return {"layers": found, "dtypes": dtypes}


def how_far(here, *, name, other):
    """The largest difference between two models' answers, beside how large the answers are."""
    import torch

    answers = []
    for one in (name, other):
        model = here.models[one]
        with torch.no_grad():
            answers.append(model(**worker.example_inputs(model)).logits.float())
    return [(answers[0] - answers[1]).abs().max().item(), answers[1].std().item()]


def stated_config(here, *, name="model"):
    model = here.models[name]
    stated = model.config.quantization_config
    return {
        "stated": stated if isinstance(stated, dict) else stated.to_dict(),
        "method": str(getattr(model.quantization_method, "value", model.quantization_method)),
        "is_quantized": model.is_quantized,
    }


def three(workers, cfg):
    """A producer, a client, and a process that loads without a cache; all count."""
    producer, client, plain = workers.several(3)
    for one in (producer, client, plain):
        one.do(count_quantizing)
    first = producer.do(worker.attach, cfg=cfg)
    second = client.do(worker.attach, cfg=cfg)
    third = plain.do(worker.attach, cfg=cfg, mode="off")
    assert [report["source"] for report in (first, second, third)] == ["disk", "cache", "disk"]
    assert first["published"]
    assert first["warnings"] == second["warnings"] == third["warnings"] == []
    return producer, client, plain


def assert_equal(producer, client, plain):
    assert client.do(worker.output) == producer.do(worker.output) == plain.do(worker.output)
    reference = plain.do(worker.picture)
    assert client.do(worker.picture) == producer.do(worker.picture) == reference


def weights_of(written):
    """Transformers keeps DeepSeek's router in float32, and saves it so."""
    return {name: facts for name, facts in written["model.safetensors"].items() if ".mlp.gate." not in name}


# ---- Transformers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_quantized_checkpoint_is_attached_as_it_is(kind, checkpoints, workers, daemon, tmp_path):
    cfg = {"checkpoint": str(checkpoints / kind / "fp8")}
    producer, client, plain = three(workers, cfg)
    assert_equal(producer, client, plain)
    assert [one.do(counted) for one in (producer, client, plain)] == [0, 0, 0]

    found = client.do(kinds_of_layers)
    assert len(found["layers"]["BlockFP8Linear"]) >= 4
    assert ("BlockFP8Experts" in found["layers"]) == (kind in ("qwen3_moe", "deepseek_v3"))
    assert found["dtypes"]["lm_head.weight"] == "bfloat16"
    assert {"float8_e4m3fn", "float32", "bfloat16"} == set(found["dtypes"].values())

    client.do(worker.load_without_us, cfg={"checkpoint": str(checkpoints / kind / "dequantized")}, name="dequantized")
    difference, size = client.do(how_far, name="model", other="dequantized")
    assert difference < 0.05 * size  # bfloat16's own rounding, in another order

    client.do(save_pretrained, folder=str(tmp_path / "client"))
    written = saved(tmp_path / "client")
    assert weights_of(written) == weights_of(saved(checkpoints / kind / "fp8"))
    stated = written["config.json"]["quantization_config"]
    assert (stated["quant_method"], stated["weight_block_size"]) == ("fp8", list(BLOCKS[kind]))
    assert client.do(stated_config) == producer.do(stated_config) == plain.do(stated_config)
    assert client.do(stated_config)["method"] == "fp8"


@pytest.mark.parametrize("kind", BLOCKS)
def test_another_checkpoint_is_quantized_at_load_and_once(kind, checkpoints, workers, daemon, tmp_path):
    cfg = {
        "checkpoint": str(checkpoints / kind / "bf16"),
        "quantization": FP8,
        "quantization_config": {"weight_block_size": list(BLOCKS[kind])},
    }
    producer, client, plain = three(workers, cfg)
    assert_equal(producer, client, plain)
    assert producer.do(counted) == plain.do(counted) > 4
    assert client.do(counted) == 0
    # At load or on disk: the same bits.
    client.do(worker.attach, cfg={"checkpoint": str(checkpoints / kind / "fp8")}, mode="off", name="on disk")
    assert client.do(worker.output) == client.do(worker.output, name="on disk")
    client.do(save_pretrained, folder=str(tmp_path / "client"))
    assert weights_of(saved(tmp_path / "client")) == weights_of(saved(checkpoints / kind / "fp8"))
    assert client.do(verified, cfg=cfg)["differences"] == []


def test_the_usual_block_is_128_and_blocks_are_part_of_the_identity(checkpoints, workers, daemon):
    cfg = {"checkpoint": str(checkpoints / "qwen3_wide" / "bf16"), "quantization": FP8}
    producer, client = workers.several(2)
    usual = producer.do(worker.attach, cfg=cfg)
    same = client.do(worker.attach, cfg={**cfg, "quantization_config": {"weight_block_size": [128, 128]}})
    assert (same["source"], same["fingerprint"]) == ("cache", usual["fingerprint"])
    other = client.do(worker.attach, cfg={**cfg, "quantization_config": {"weight_block_size": [64, 64]}}, name="other")
    assert other["source"] == "disk"
    assert [difference["path"] for difference in other["differences"]] == ["model.quantization.block"]
    plain = client.do(worker.attach, cfg={"checkpoint": cfg["checkpoint"]}, name="plain")
    assert plain["source"] == "disk"
    assert "quantization.method" in [difference["path"] for difference in plain["differences"]]
    left = client.do(
        worker.attach, cfg={**cfg, "quantization_config": {"modules_to_not_convert": ["lm_head", "model.layers.0"]}}, name="left"
    )
    assert left["source"] == "disk"
    layers = client.do(kinds_of_layers, name="left")["layers"]
    assert all(path.startswith("model.layers.1.") for path in layers["BlockFP8Linear"])


def name_it_compressed(folder, block, strategy="block"):
    """The same weights as compressed-tensors would have stored them (F11)."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**weights, "strategy": strategy, "block_structure": list(block)}}
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"]}
    fp8_models.edit_config(folder, quantization_config={**stated, "config_groups": {"group_0": group}})


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_block_fp8_under_another_name(kind, checkpoints, workers, daemon, tmp_path):
    folder = shutil.copytree(checkpoints / kind / "fp8", tmp_path / "compressed")
    name_it_compressed(folder, BLOCKS[kind])
    producer, client, plain = three(workers, {"checkpoint": str(folder)})
    assert_equal(producer, client, plain)
    client.do(worker.attach, cfg={"checkpoint": str(checkpoints / kind / "fp8")}, mode="off", name="named fp8")
    assert client.do(worker.output) == client.do(worker.output, name="named fp8")
    client.do(save_pretrained, folder=str(tmp_path / "client"))
    written = saved(tmp_path / "client")
    assert written["model.safetensors"] == saved(folder)["model.safetensors"]
    assert written["config.json"]["quantization_config"] == json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("strategy", ["tensor", "channel", "token", "group"])
def test_what_is_not_block_wise_is_refused_before_anything_is_read(strategy, checkpoints, workers, daemon, tmp_path):
    folder = shutil.copytree(checkpoints / "qwen3" / "fp8", tmp_path / "compressed")
    name_it_compressed(folder, (16, 16), strategy)
    error = workers().fails(worker.attach, cfg={"checkpoint": str(folder)})
    assert error.type == "UnsupportedQuantizationError"
    assert f"{strategy!r} are not block-wise" in error.text


# ---- configs that are wrong --------------------------------------------------------------------------------------------------


def test_a_config_that_says_fp8_of_bfloat16_weights(checkpoints, workers, daemon, tmp_path):
    """Transformers would load it with a warning only; the gate looks at what came out."""
    folder = shutil.copytree(checkpoints / "qwen3" / "bf16", tmp_path / "model")
    fp8_models.edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    one, other = workers.several(2)
    error = one.fails(worker.attach, cfg={"checkpoint": str(folder)})
    assert error.type == "UnsupportedQuantizationError"
    assert "none of its tensors is float8" in error.text
    known = other.fails(worker.attach, cfg={"checkpoint": str(folder)})
    assert (known.type, known.facts["kind"]) == ("RefusedError", "'UnsupportedQuantizationError'")
    report = other.do(worker.attach, cfg={"checkpoint": str(folder)}, on_refused="load")
    assert not report["published"]
    assert any("no tensor of the checkpoint is float8" in warning for warning in report["warnings"])
    other.do(worker.load_without_us, cfg={"checkpoint": str(checkpoints / "qwen3" / "bf16")}, name="plain")
    assert other.do(worker.output) == other.do(worker.output, name="plain")


def spoil(folder, name, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed}, folder / "model.safetensors", {"format": "pt"})


SCALES = "model.layers.1.mlp.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    "change",
    [
        lambda scales: None,
        lambda scales: scales.t().contiguous(),
        lambda scales: scales[:1, :1].reshape(()).clone(),
        lambda scales: scales.amax(1).repeat_interleave(16)[:72, None].contiguous(),
    ],
    ids=["missing", "transposed", "one for all", "per channel"],
)
def test_scales_that_do_not_fit(change, checkpoints, workers, daemon, tmp_path):
    folder = shutil.copytree(checkpoints / "qwen3" / "fp8", tmp_path / "model")
    spoil(folder, SCALES, change)
    one = workers()
    error = one.fails(worker.attach, cfg={"checkpoint": str(folder)})
    assert error.type == "StateDictError"
    assert "model.layers.1.mlp.up_proj.weight" in error.text
    assert one.do(worker.entries) == []


def test_scales_in_bfloat16_are_widened(checkpoints, workers, daemon, tmp_path):
    """Some Qwen3 checkpoints store them so; Transformers' parameters are float32, and so are ours."""
    import torch

    folder = shutil.copytree(checkpoints / "qwen3" / "fp8", tmp_path / "model")
    spoil(folder, SCALES, lambda scales: scales.to(torch.bfloat16))
    producer, client = workers.several(2)
    producer.do(worker.attach, cfg={"checkpoint": str(folder)})
    assert client.do(worker.attach, cfg={"checkpoint": str(folder)})["source"] == "cache"
    assert client.do(kinds_of_layers)["dtypes"][SCALES] == "float32"
    assert client.do(worker.output) == producer.do(worker.output)


def test_a_block_that_is_larger_than_a_weight(checkpoints, workers, daemon, tmp_path):
    folder = shutil.copytree(checkpoints / "qwen3" / "fp8", tmp_path / "model")
    fp8_models.edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    error = workers().fails(worker.attach, cfg={"checkpoint": str(folder)})
    assert error.type == "UnsupportedQuantizationError"
    assert error.facts["module"] == "'model.layers.0.self_attn.q_proj'"
    assert "larger than the weight" in error.text


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"weight_block_size": [0, 16]}, "not two positive integers"),
        ({"weight_block_size": None}, "no weight_block_size"),
        ({"bits": 4}, "no option bits"),
        ({"modules_to_not_convert": "lm_head"}, "not a list of names"),
    ],
)
def test_a_wrong_wish_is_a_config_error(wrong, text, checkpoints, workers, daemon):
    cfg = {"checkpoint": str(checkpoints / "qwen3" / "bf16"), "quantization": FP8, "quantization_config": wrong}
    error = workers().fails(worker.attach, cfg=cfg)
    assert (error.type, text in error.text) == ("ConfigError", True)


def test_wishes_for_a_quantized_checkpoint_are_a_config_error(checkpoints, workers, daemon):
    cfg = {
        "checkpoint": str(checkpoints / "qwen3" / "fp8"),
        "quantization": FP8,
        "quantization_config": {"weight_block_size": [32, 32]},
    }
    error = workers().fails(worker.attach, cfg=cfg)
    assert (error.type, "quantized already" in error.text) == ("ConfigError", True)


# ---- plain modules -----------------------------------------------------------------------------------------------------------

TOWER, QUANTIZED_TOWER = "support.fp8_models:Tower", "support.fp8_models:QuantizedTower"
AT_LOAD = {"build": TOWER, "quantization": FP8, "quantization_config": {"weight_block_size": [16, 16]}}


def test_plain_modules_are_quantized_at_load_and_once(workers, daemon, tmp_path):
    workers().do(save_plain, path=str(tmp_path / "tower.safetensors"), build=TOWER)
    cfg = {"checkpoint": str(tmp_path / "tower.safetensors"), "strict": False, "seed": 0, **AT_LOAD}
    producer, client, plain = three(workers, cfg)
    assert_equal(producer, client, plain)
    assert [one.do(counted) for one in (producer, client, plain)] == [2, 0, 2]
    layers = client.do(kinds_of_layers)["layers"]
    assert layers["BlockFP8Linear"] == ["up", "down"]  # not: small, back, tied, the attention's own, the head
    assert layers["Linear"] == ["small", "back", "tied", "score"]
    ties = client.do(worker.picture)["ties"]
    assert (ties["again.weight"], ties["tied.weight"]) == ("down.weight", "embed.weight")


def test_plain_modules_that_are_built_quantized_load_as_they_are(workers, daemon, tmp_path):
    maker = workers()
    plain_file, quantized_file = str(tmp_path / "plain.safetensors"), str(tmp_path / "quantized.safetensors")
    maker.do(save_plain, path=plain_file, build=TOWER)
    maker.do(save_plain, path=quantized_file, build=TOWER, quantize_from=plain_file)
    cfg = {"checkpoint": quantized_file, "build": QUANTIZED_TOWER, "quantization": FP8}
    producer, client, plain = three(workers, cfg)
    assert_equal(producer, client, plain)
    assert [one.do(counted) for one in (producer, client, plain)] == [0, 0, 0]
    client.do(worker.attach, cfg={"checkpoint": plain_file, **AT_LOAD}, mode="off", name="at load")
    assert client.do(worker.output) == client.do(worker.output, name="at load")
    hidden = client.fails(worker.attach, cfg={"checkpoint": quantized_file, "build": QUANTIZED_TOWER}, name="hidden")
    assert hidden.type == "UnsupportedQuantizationError"
    assert "float8_e4m3fn" in hidden.text


def test_a_plain_module_with_nothing_to_quantize(workers, daemon, tmp_path):
    one = workers()
    one.do(save_plain, path=str(tmp_path / "tower.safetensors"), build=TOWER)
    cfg = {"checkpoint": str(tmp_path / "tower.safetensors"), "build": TOWER, "quantization": FP8}  # blocks of 128: all too small
    error = one.fails(worker.attach, cfg=cfg)
    assert error.type == "UnsupportedQuantizationError"
    assert "nothing in it could be quantized" in error.text
