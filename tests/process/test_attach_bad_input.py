"""Bad input, each with its own clear error: nothing is lost, nothing is published, and no process is harmed."""

from __future__ import annotations

import functools
import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file
from support import plain_models, worker

LINKED = "support.plain_models:Linked"


def plain(folder):
    """A checkpoint that is in order."""
    return {"checkpoint": plain_models.save(plain_models.Linked, folder / "model.safetensors"), "build": LINKED}


def edit(path, change):
    """Change the bytes of a file."""
    with open(path, "rb") as file:
        data = bytearray(file.read())
    data = change(data)
    with open(path, "wb") as file:
        file.write(data)


# ---- files -------------------------------------------------------------------------------------------------------------------


def missing(folder):
    cfg = plain(folder)
    os.unlink(cfg["checkpoint"])
    return cfg


def empty_folder(folder):
    (folder / "nothing").mkdir()
    return {"checkpoint": str(folder / "nothing"), "build": LINKED}


def truncated(folder):
    cfg = plain(folder)
    edit(cfg["checkpoint"], lambda data: data[:-40])
    return cfg


def truncated_header(folder):
    cfg = plain(folder)
    edit(cfg["checkpoint"], lambda data: data[:20])
    return cfg


def corrupt_header(folder):
    cfg = plain(folder)
    edit(cfg["checkpoint"], lambda data: data[:8] + b"\xff" * 16 + data[24:])
    return cfg


def not_safetensors(folder):
    (folder / "model.safetensors").write_bytes(b"GIF89a" * 100)
    return {"checkpoint": str(folder / "model.safetensors"), "build": LINKED}


def index_without_shard(folder):
    cfg = plain(folder)
    names = list(load_file(cfg["checkpoint"]))
    index = {"weight_map": dict.fromkeys(names, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {**cfg, "checkpoint": str(folder / "model.safetensors.index.json")}


def index_without_tensor(folder):
    cfg = plain(folder)
    index = {"weight_map": dict.fromkeys([*load_file(cfg["checkpoint"]), "block.other"], "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {**cfg, "checkpoint": str(folder / "model.safetensors.index.json")}


def rewrite(cfg, change):
    state = load_file(cfg["checkpoint"])
    change(state)
    save_file(state, cfg["checkpoint"])
    return cfg


def tensor_missing(folder):
    return rewrite(plain(folder), lambda state: state.pop("block.bias"))


def tensor_unexpected(folder):
    return rewrite(plain(folder), lambda state: state.update(stray=state["block.bias"].clone()))


def tensor_of_another_shape(folder):
    return rewrite(plain(folder), lambda state: state.update({"block.bias": state["block.bias"][:3].clone()}))


def tensor_of_another_kind(folder):
    import torch

    return rewrite(plain(folder), lambda state: state.update({"block.bias": torch.ones(8, dtype=torch.complex64)}))


def no_such_dtype(folder):
    return {**plain(folder), "dtype": "float3"}


def no_such_build(folder):
    return {**plain(folder), "build": "support.plain_models:Nothing"}


def not_a_module(folder):
    return {**plain(folder), "build": "builtins:dict"}


def no_such_argument(folder):
    return {**plain(folder), "build_kwargs": {"height": 3}}


def peeking(folder):
    checkpoint = plain_models.save(plain_models.Peeking, folder / "model.safetensors")
    return {"checkpoint": checkpoint, "build": "support.plain_models:Peeking"}


BAD = [
    (missing, "CheckpointNotFoundError", "model.safetensors: no such checkpoint"),
    (empty_folder, "CheckpointNotFoundError", "nothing"),
    (truncated, "CorruptCheckpointError", "model.safetensors"),
    (truncated_header, "CorruptCheckpointError", "model.safetensors"),
    (corrupt_header, "CorruptCheckpointError", "model.safetensors"),
    (not_safetensors, "CorruptCheckpointError", "model.safetensors"),
    (index_without_shard, "CheckpointNotFoundError", "model-00002-of-00002.safetensors"),
    (index_without_tensor, "CorruptCheckpointError", "block.other"),
    (tensor_missing, "StateDictError", 'Missing key(s) in state_dict: "block.bias"'),
    (tensor_unexpected, "StateDictError", 'Unexpected key(s) in state_dict: "stray"'),
    (tensor_of_another_shape, "StateDictError", "size mismatch for block.bias"),
    (tensor_of_another_kind, "StateDictError", "dtype mismatch for block.bias"),
    (no_such_dtype, "ConfigError", "float3"),
    (no_such_build, "ConfigError", "Nothing"),
    (not_a_module, "BuildError", "dict"),
    (no_such_argument, "ConfigError", "height"),
    (peeking, "BuildError", "build_meta"),
]


@pytest.mark.parametrize(("make", "error", "says"), BAD, ids=[item[0].__name__ for item in BAD])
def test_bad_input_is_told_and_harms_nobody(make, error, says, workers, daemon, tmp_path):
    cfg = make(tmp_path)
    (tmp_path / "good").mkdir()
    good = plain(tmp_path / "good")
    one = workers()
    for _ in range(2):  # the second time, nothing of the first is in the way
        found = one.fails(worker.attach, cfg=cfg, fallback="load")
        assert found.type == error
        assert says in found.text
    with daemon.connect() as connection:
        status = connection.status()
        assert (status.entries, status.producing, status.waiting, status.refusals) == (0, 0, 0, 0)
    assert one.do(worker.attach, cfg=good)["published"]


def test_a_hook_is_the_way_out_for_an_init_that_peeks(workers, daemon, tmp_path):
    cfg = {**peeking(tmp_path), "build_meta": "support.plain_models:build_without_peeking"}
    one, other, plain_one = workers.several(3)
    report = one.do(worker.attach, cfg=cfg)
    assert report["published"]
    assert "built in full" in report["warnings"][0]
    assert other.do(worker.attach, cfg=cfg)["source"] == "cache"
    plain_one.do(worker.load_without_us, cfg=peeking(tmp_path))
    assert one.do(worker.output) == other.do(worker.output) == plain_one.do(worker.output)


# ---- Transformers ------------------------------------------------------------------------------------------------------------


def make_llama(here, *, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).save_pretrained(folder)


def configured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shortened(folder):
    edit(folder / "model.safetensors", lambda data: data[:-1000])


def pickled(folder):
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")


BAD_FOLDERS = [
    (lambda folder: configured(folder, architectures=["LlamaForNothing"]), "BuildError", "unknown architecture 'LlamaForNothing'"),
    (lambda folder: configured(folder, model_type="no_such_type"), "BuildError", "no_such_type"),
    (lambda folder: configured(folder, architectures=[]), "BuildError", "names no architecture"),
    (lambda folder: configured(folder, intermediate_size=64), "StateDictError", "mlp"),
    (lambda folder: (folder / "config.json").write_text("{"), "CorruptCheckpointError", "config.json"),
    (lambda folder: (folder / "config.json").unlink(), "CheckpointNotFoundError", "config.json"),
    (shortened, "CorruptCheckpointError", "model.safetensors"),
    (pickled, "CheckpointError", "pickled weights"),
]


@pytest.fixture(scope="module")
def llama(worker_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    maker = worker_pool.take()
    maker.do(make_llama, folder=str(folder))
    worker_pool.give_back(maker)
    return folder


@pytest.mark.parametrize(("change", "error", "says"), BAD_FOLDERS, ids=[item[2].split()[0] for item in BAD_FOLDERS])
def test_a_bad_transformers_folder(change, error, says, workers, daemon, llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    change(folder)
    one = workers()
    found = one.fails(worker.attach, cfg={"checkpoint": str(folder)}, fallback="load")
    assert found.type == error
    assert says in found.text
    with daemon.connect() as connection:
        status = connection.status()
        assert (status.entries, status.producing) == (0, 0)
    assert one.do(worker.attach, cfg={"checkpoint": str(llama)})["published"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"overrides": {"rope_thetta": 1.0}}, "overrides.rope_thetta"),
        ({"build_kwargs": {"revision": "main"}}, "use the fields of ModelConfig"),
    ],
    ids=["override", "build_kwargs"],
)
def test_bad_options_for_a_transformers_model(more, says, workers, daemon, llama):
    found = workers().fails(worker.attach, cfg={"checkpoint": str(llama), **more})
    assert found.type == "ConfigError"
    assert says in found.text


# ---- code without a name -----------------------------------------------------------------------------------------------------


def attach_lambda(here, *, cfg, opaque, **more):
    """Builds by a lambda that closes over a number, or over something whose content nobody can tell."""
    closed_over = iter([8]) if opaque else 8

    def width():
        return closed_over if isinstance(closed_over, int) else 8

    return worker.attach(here, cfg={**cfg, **more, "build": lambda: plain_models.Linked(width())})


def attach_partial(here, *, cfg):
    return worker.attach(here, cfg={**cfg, "build": functools.partial(plain_models.Linked, width=8)})


def test_a_lambda_is_fine_where_its_identity_can_be_established(workers, daemon, tmp_path):
    cfg = plain(tmp_path)
    one, other = workers.several(2)
    for attach in (functools.partial(worker_do, attach_lambda, opaque=False), functools.partial(worker_do, attach_partial)):
        made, found = attach(one, cfg=cfg), attach(other, cfg=cfg)
        assert (made["source"], found["source"]) == ("disk", "cache")
        assert one.do(worker.output) == other.do(worker.output)


def worker_do(function, one, **arguments):
    return one.do(function, **arguments)


def test_a_lambda_without_identity_is_told_what_to_do(workers, daemon, tmp_path):
    one, other = workers.several(2)
    error = one.fails(attach_lambda, cfg=plain(tmp_path), opaque=True)
    assert error.type == "FingerprintError"
    assert "code_version" in error.text
    assert "closure 'closed_over'" in error.text
    vouched = {"cfg": plain(tmp_path), "opaque": True, "code_version": "1"}
    assert one.do(attach_lambda, **vouched)["published"]
    assert other.do(attach_lambda, **vouched)["source"] == "cache"


# ---- change while loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["load", "publish"])
@pytest.mark.parametrize("how", ["rewritten", "replaced", "removed"])
def test_a_checkpoint_that_changes_while_it_is_loaded(at, how, workers, daemon, tmp_path):
    cfg = plain(tmp_path)
    path = cfg["checkpoint"]
    plain_models.save(plain_models.Linked, tmp_path / "new" / "model.safetensors", seed=1)
    one, other = workers.several(2)
    release = tmp_path / "go"
    one.begin(worker.attach_and_stop, at=at, release=str(release), cfg=cfg, fallback="load")
    one.wait_for(at)
    if how == "rewritten":
        edit(path, lambda data: (tmp_path / "new" / "model.safetensors").read_bytes())
    elif how == "replaced":
        os.replace(tmp_path / "new" / "model.safetensors", path)
    else:
        os.unlink(path)
    release.touch()
    if at == "publish":  # it was checked for the last time before the message that commits: what is published is the old content
        assert one.result()["published"]
        return
    with pytest.raises(Exception, match="while the checkpoint was being read") as caught:
        one.result()
    assert caught.value.type == "CheckpointChangedError"
    assert other.do(worker.entries) == []
    if how != "removed":
        assert other.do(worker.attach, cfg=cfg)["published"]
        one.do(worker.load_without_us, cfg=cfg, name="plain")
        assert other.do(worker.output) == one.do(worker.output, name="plain")
