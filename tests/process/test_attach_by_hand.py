"""What is published by hand has a name of its own (D3); what a checkpoint does not decide is not published (D4)."""

from __future__ import annotations

import pytest
from support import plain_models, worker


def merge(here, *, name="model", factor=2.0):
    """Something that a caller does to a model before publishing it."""
    import torch

    with torch.no_grad():
        here.models[name].block.weight.mul_(factor)
    here.models[name].merged = "lora-7"


def merged_with(here, *, name="model"):
    return here.models[name].merged


# ---- variants ----------------------------------------------------------------------------------------------------------------


def test_a_variant_is_found_by_its_name_alone(workers, daemon, linked):
    one, other, third = workers.several(3)
    one.do(worker.attach, cfg=linked, mode="off")
    one.do(merge)
    merged = one.do(worker.output)
    report = one.do(worker.publish, cfg=linked, variant="lora-7")
    assert report["published"]
    assert one.do(worker.output) == merged, "the model goes on working, on the published bytes"

    found = other.do(worker.attach, cfg=linked, variant="lora-7", fallback="error")
    assert (found["source"], found["fingerprint"]) == ("cache", report["fingerprint"])
    assert (other.do(worker.output), other.do(merged_with)) == (merged, "lora-7")

    plain = third.do(worker.attach, cfg=linked)
    assert plain["fingerprint"] != report["fingerprint"]
    assert [difference["path"] for difference in plain["differences"]] == ["variant"]
    third.do(worker.load_without_us, cfg=linked, name="reference")
    assert third.do(worker.output) == third.do(worker.output, name="reference") != merged

    one.do(merge, name="published")
    assert other.do(worker.output) == merged, "a later write of the publisher is its own"
    assert "block.weight" in one.do(worker.verify, name="published")


def test_a_variant_that_is_taken(workers, daemon, linked):
    one, other = workers.several(2)
    for process, factor in ((one, 2.0), (other, 3.0)):
        process.do(worker.attach, cfg=linked, mode="off")
        process.do(merge, factor=factor)
    one.do(worker.publish, cfg=linked, variant="v")
    first = one.do(worker.output)
    error = other.fails(worker.publish, cfg=linked, variant="v")
    assert error.type == "ConfigError"
    assert "is published already" in error.text
    assert other.do(worker.attach, cfg=linked, variant="v", name="theirs")["source"] == "cache"
    assert other.do(worker.output, name="theirs") == first != other.do(worker.output)
    assert other.do(worker.publish, cfg=linked, variant="w")["published"]


def test_a_variant_that_nobody_published(workers, daemon, linked):
    one, other = workers.several(2)
    one.do(worker.attach, cfg=linked)
    error = other.fails(worker.attach, cfg=linked, variant="lora-7")
    assert error.type == "MismatchError"
    assert "only the process that published it can publish it" in error.text
    assert "variant" in error.facts["differences"]
    assert len(one.do(worker.entries)) == 1


def test_a_variant_needs_a_name_and_a_cache(workers, daemon, linked):
    one = workers()
    one.do(worker.attach, cfg=linked, mode="off")
    assert one.fails(worker.publish, cfg=linked, variant="").type == "ConfigError"
    assert one.fails(worker.attach, cfg=linked, mode="off", variant="v").type == "ConfigError"


def test_other_weights_cannot_get_under_the_checkpoints_own_fingerprint(workers, daemon, linked):
    """Whatever is published by hand, an attach that names no variant gets what is on disk."""
    one, other = workers.several(2)
    one.do(worker.attach, cfg=linked, mode="off")
    one.do(merge)
    one.do(worker.publish, cfg=linked, variant="v")
    report = other.do(worker.attach, cfg=linked)
    assert report["source"] == "disk"
    other.do(worker.load_without_us, cfg=linked, name="reference")
    assert other.do(worker.output) == other.do(worker.output, name="reference")


def test_publishing_what_cannot_be_carried(workers, daemon, linked):
    one, other = workers.several(2)
    one.do(worker.attach, cfg={**linked, "finalize": "support.plain_models:wrap"}, mode="off")
    error = one.fails(worker.publish, cfg=linked, variant="v")
    assert error.type == "CaptureError"
    assert list(error.problems) == ["handle"]
    assert one.do(worker.output)
    assert other.do(worker.entries) == []


# ---- not a function of the checkpoint ----------------------------------------------------------------------------------------


def partial(tmp_path):
    """A checkpoint without the head."""
    from safetensors.torch import load_file, save_file

    path = plain_models.save(plain_models.Partial, tmp_path / "partial.safetensors")
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.startswith("head")}, path)
    return {"checkpoint": path, "build": "support.plain_models:Partial", "strict": False}


def make_bert(here, *, folder):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=64, **sizes)).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["plain", "transformers"])
def test_new_tensors_need_a_seed(kind, workers, daemon, tmp_path):
    one, other, third = workers.several(3)
    if kind == "plain":
        cfg, new = partial(tmp_path), "head.weight"
    else:
        one.do(make_bert, folder=str(tmp_path / "bert"))
        build = "transformers:BertForSequenceClassification"
        cfg, new = {"checkpoint": str(tmp_path / "bert"), "build": build, "loader": "huggingface"}, "classifier.weight"

    error = one.fails(worker.attach, cfg=cfg)
    assert error.type == "NotAFunctionOfCheckpointError"
    assert new in error.text
    assert "seed" in error.text
    assert other.fails(worker.attach, cfg=cfg).facts["kind"] == "'NotAFunctionOfCheckpointError'"
    assert one.do(worker.entries) == []
    report = one.do(worker.attach, cfg=cfg, on_refused="load", name="unpublished")
    assert not report["published"]
    assert new in report["warnings"][-1]

    seeded = {**cfg, "seed": 7}
    made, found = one.do(worker.attach, cfg=seeded), other.do(worker.attach, cfg=seeded)
    assert made["published"]
    assert found["source"] == "cache"
    assert one.do(worker.output) == other.do(worker.output)
    third.do(worker.attach, cfg=seeded, mode="off")
    assert third.do(worker.output) == other.do(worker.output), "the seed decides the new tensors wherever they are made"
    assert third.do(worker.attach, cfg={**cfg, "seed": 8}, name="eight")["fingerprint"] != made["fingerprint"]
    assert third.do(worker.output, name="eight") != other.do(worker.output)
