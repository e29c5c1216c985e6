"""A refusal is an answer: given once, remembered, told to everybody at once, and forgotten on request."""

from __future__ import annotations

import json
import os

import pytest
from support import plain_models, worker


@pytest.fixture
def opaque(tmp_path):
    return {
        "checkpoint": plain_models.save(plain_models.Linked, tmp_path / "linked.safetensors"),
        "build": "support.plain_models:Linked",
        "finalize": "support.plain_models:wrap",
    }


def forbid_loading(here):
    """From now on a load is a mistake."""
    from torchwcache_nn.adapter import NNAdapter

    def load(self, cfg, context):
        raise AssertionError("loaded, although the refusal was known")

    here.patch(NNAdapter, "load", load)


def test_what_cannot_be_carried_is_named_once_and_remembered(workers, daemon, opaque):
    one, other = workers.several(2)
    error = one.fails(worker.attach, cfg=opaque)
    assert error.type == "CaptureError"
    assert list(error.problems) == ["handle"]
    assert one.do(worker.entries) == []

    other.do(forbid_loading)
    known = other.fails(worker.attach, cfg=opaque)
    assert known.type == "RefusedError"
    assert known.facts["kind"] == "'CaptureError'"
    assert "handle" in known.facts["reason"]
    assert "evict" in known.text
    assert "on_refused" in known.text


def test_a_refused_model_serves_all_the_same_if_so_wished(workers, daemon, opaque):
    """As engines start by default: as if there were no cache, and saying why."""
    one, other = workers.several(2)
    first = one.do(worker.attach, cfg=opaque, on_refused="load")
    second = other.do(worker.attach, cfg=opaque, on_refused="load")
    for report, says in ((first, "CaptureError"), (second, "RefusedError")):
        assert (report["source"], report["published"], report["mapped_nbytes"]) == ("disk", False, 0)
        (warning,) = report["warnings"]
        assert says in warning
        assert "handle" in warning
    assert one.do(worker.output) == other.do(worker.output)
    assert one.do(worker.footprint)["memfds"] == 0


def test_all_who_wait_are_told_at_once(workers, daemon, opaque, tmp_path, wait_until):
    producer, *waiting = workers.several(4)
    release = tmp_path / "go"
    producer.begin(worker.attach_and_stop, at="load", release=str(release), cfg=opaque)
    producer.wait_for("load")
    for one in waiting:
        one.do(forbid_loading)
        one.begin(worker.attach, cfg=opaque)
    with daemon.connect() as connection:
        wait_until(lambda: connection.status().waiting == 3, what="three wait")
    release.touch()
    for one, error in ((producer, "CaptureError"), *((one, "RefusedError") for one in waiting)):
        with pytest.raises(Exception, match="handle") as caught:
            one.result(timeout_s=20)
        assert caught.value.type == error
    with daemon.connect() as connection:
        assert (connection.status().waiting, connection.status().producing) == (0, 0)


def evict(here, **options):
    from torchwcache import WeightCache

    found = WeightCache.connect().evict(**options)
    return [list(found.freed), list(found.pending)]


@pytest.mark.parametrize("by", ["everything", "slot"])
def test_a_refusal_can_be_forgotten(by, workers, daemon, opaque):
    one = workers()
    assert one.fails(worker.attach, cfg=opaque).type == "CaptureError"
    assert one.fails(worker.attach, cfg=opaque).type == "RefusedError"
    slot = one.do(worker.attach, cfg=opaque, on_refused="load")["slot"]
    assert one.do(evict, everything=True) == [[], []]
    assert one.fails(worker.attach, cfg=opaque).type == "RefusedError", "eviction alone forgets no refusal"
    one.do(evict, refusals=True, **({"everything": True} if by == "everything" else {"slot": slot}))
    assert one.fails(worker.attach, cfg=opaque).type == "CaptureError", "it was tried again"


def test_ignoring_what_is_opaque_is_the_way_out(workers, daemon, opaque):
    one, other = workers.several(2)
    assert one.fails(worker.attach, cfg=opaque).type == "CaptureError"
    cfg = {**opaque, "ignore": {"handle*": "opened anew by whoever needs it"}}
    assert one.do(worker.attach, cfg=cfg)["published"]
    report = other.do(worker.attach, cfg=cfg)
    assert report["source"] == "cache"
    assert one.do(worker.output) == other.do(worker.output)


# ---- quantization ------------------------------------------------------------------------------------------------------------

QUANTIZED = [
    ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors (pack-quantized)"),
    ({"load_in_8bit": True}, "bitsandbytes (load_in_8bit)"),
    ({"bits": 4}, "an unnamed method"),
]


@pytest.mark.parametrize(("quantization", "method"), QUANTIZED, ids=[method for _, method in QUANTIZED])
def test_a_quantized_config_is_refused_by_name_before_loading(quantization, method, workers, daemon, tmp_path):
    plain_models.save(plain_models.Linked, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    cfg = {"checkpoint": str(tmp_path / "model"), "build": "support.plain_models:Linked"}
    one = workers()
    one.do(forbid_loading)
    error = one.fails(worker.attach, cfg=cfg)
    assert error.type == "UnsupportedQuantizationError"
    assert error.facts["method"] == repr(method)
    assert repr(method) in error.text
    assert "Verified methods: " in error.text


def make_quantized_llama(here, *, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).save_pretrained(folder)
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump({**config, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}, file)


def test_a_quantized_transformers_model_is_refused_by_name_before_loading(workers, daemon, tmp_path):
    one = workers()
    one.do(make_quantized_llama, folder=str(tmp_path / "llama"))
    one.do(forbid_loading)
    error = one.fails(worker.attach, cfg={"checkpoint": str(tmp_path / "llama")})
    assert error.type == "UnsupportedQuantizationError"
    assert "'gptq'" in error.text


def pack(module):
    """F10: what a quantized layout leaves in a module whose config says nothing."""
    import torch

    module.block.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))


def test_a_layout_that_hides_behind_its_config(workers, daemon, tmp_path):
    cfg = {
        "checkpoint": plain_models.save(plain_models.Linked, tmp_path / "linked.safetensors"),
        "build": "support.plain_models:Linked",
    }
    one, other = workers.several(2)
    error = one.fails(attach_packed, cfg=cfg)
    assert error.type == "UnsupportedQuantizationError"
    assert error.facts["module"] == "'block.qweight'"
    known = other.fails(attach_packed, cfg=cfg)
    assert (known.type, known.facts["kind"]) == ("RefusedError", "'UnsupportedQuantizationError'")


def attach_packed(here, *, cfg):
    return worker.attach(here, cfg={**cfg, "finalize": pack})
