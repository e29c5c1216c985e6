"""What a module is besides its weights, carried to another process: ties, views, flags, buffers, class attributes."""

from __future__ import annotations

import contextlib
import os
import resource
import time

import pytest
from support import plain_models, worker
from support.worker import digest


@pytest.fixture
def linked(tmp_path):
    return {
        "checkpoint": plain_models.save(plain_models.Linked, tmp_path / "linked.safetensors"),
        "build": "support.plain_models:Linked",
        "finalize": "support.plain_models:stamp",
    }


def inside(here, *, name="model"):
    """Everything about a ``Linked`` that ``stamp`` went over: what is the same object, what views what, which flags it has."""
    module = here.models[name]
    weight = module.block.weight
    base = weight.data_ptr()

    def place(tensor):
        return [tensor.data_ptr() - base, list(tensor.shape), list(tensor.stride()), digest(tensor)]

    return {
        "tied": module.head.weight is module.embed,
        "same object": module.parts["both"][1] is weight,
        "views": [place(t) for t in (*module.conv_weights, module.parts["upper"], module.parts["both"][0])],
        "windows": [place(module.windows), place(module.again)],
        "one storage": len({t.untyped_storage().data_ptr() for t in (weight, module.windows, module.again, *module.conv_weights)}),
        "angles": ["angles" in module.state_dict(), digest(module.angles)],
        "flags": [module.format_ue8m0, module.layout.name, module.input_scale, module.block.is_shuffled, weight.scale_format],
        "shapes": [module.shapes["kernel"][0], str(module.shapes["kernel"][1]), module.shapes["order"]],
        "kinds": [type(module.shapes["kernel"]).__name__, type(module.conv_weights).__name__, type(module.parts["both"]).__name__],
        "derived": digest(module.w_kc),
        "meta": [t.is_meta for t in (weight, module.windows, module.again, module.angles, module.w_kc, *module.conv_weights)],
    }


def test_everything_arrives(workers, daemon, linked):
    """F5, F6, F8, F9, F12 at once: a module whose answer depends on all of them."""
    producer, client, plain = workers.several(3)
    plain.do(worker.load_without_us, cfg=linked)
    assert producer.do(worker.attach, cfg=linked)["warnings"] == []
    assert client.do(worker.attach, cfg=linked)["source"] == "cache"
    expected = plain.do(inside)
    assert expected["tied"]
    assert expected["one storage"] == 1
    assert not any(expected["meta"])
    assert producer.do(inside) == expected
    assert client.do(inside) == expected
    assert client.do(worker.picture) == producer.do(worker.picture) == plain.do(worker.picture)
    assert client.do(worker.output) == producer.do(worker.output) == plain.do(worker.output)


def write_through_a_view(here, *, name="model"):
    module = here.models[name]
    module.conv_weights[1][0, 0] = 42.0
    views = (module.block.weight, module.conv_weights[0], module.parts["upper"], module.parts["both"][1])
    return [float(view.detach()[0, 0]) for view in views]


def test_views_stay_views(workers, daemon, linked):
    producer, client = workers.several(2)
    producer.do(worker.attach, cfg=linked)
    client.do(worker.attach, cfg=linked)
    assert client.do(write_through_a_view) == [42.0] * 4
    names = client.do(worker.verify)
    assert {"block.weight", "conv_weights[0]", "conv_weights[1]"} <= set(names)
    assert not {"embed", "head.weight", "w_kc"} & set(names)
    assert producer.do(worker.verify) == []


# ---- F7 ----------------------------------------------------------------------------------------------------------------------


def test_what_was_never_filled_is_refused_and_listed(workers, daemon, linked):
    one, other = workers.several(2)
    cfg = {**linked, "finalize": "support.plain_models:drop_bias"}
    error = one.fails(worker.attach, cfg=cfg)
    assert error.type == "CaptureError"
    assert error.problems == {"block.bias": "it is still on the meta device after loading: nothing gave it a value"}
    assert one.do(worker.entries) == []
    assert other.fails(worker.attach, cfg=cfg).type == "RefusedError"


def delete_bias(module):
    del module.block.bias


def shrink(module):
    import torch

    module.block.bias = torch.nn.Parameter(torch.ones(2))


def test_what_the_load_changed_is_what_arrives(workers, daemon, linked):
    """A parameter that is gone is gone, and one of another shape has that shape: neither is made up again."""
    one, other = workers.several(2)
    for hook in (delete_bias, shrink):
        cfg = {**linked, "build": None, "finalize": None}
        made = one.do(attach_with, cfg=cfg, hook=hook.__name__)
        found = other.do(attach_with, cfg=cfg, hook=hook.__name__)
        assert (made["source"], found["source"]) == ("disk", "cache")
        assert made["bias"] == found["bias"]


def attach_with(here, *, cfg, hook):
    cfg = {**cfg, "build": plain_models.Linked, "finalize": globals()[hook]}
    report = worker.attach(here, cfg=cfg, name=hook)
    bias = dict(here.models[hook].named_parameters()).get("block.bias")
    return {"source": report["source"], "bias": None if bias is None else [list(bias.shape), digest(bias)]}


# ---- F23 ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def normed(tmp_path):
    return {
        "checkpoint": plain_models.save(plain_models.Normed, tmp_path / "normed.safetensors"),
        "build": "support.plain_models:Normed",
    }


def train(here, *, name="model"):
    """Run in training mode, which writes every buffer."""
    module = here.models[name].train()
    before = digest(module.norm.running_mean)
    module(**module.example_inputs())
    module.eval()
    return [before != digest(module.norm.running_mean), float(module.calls), int(module.norm.num_batches_tracked)]


def buffers(here, *, name="model"):
    return {path: digest(tensor) for path, tensor in here.models[name].named_buffers()}


@pytest.mark.parametrize("access", ["copy-on-write", "readonly"])
def test_buffers_are_each_process_own(access, workers, daemon, normed):
    producer, client, later = workers.several(3)
    producer.do(worker.attach, cfg=normed)
    report = client.do(worker.attach, cfg=normed, access=access)
    assert report["source"] == "cache"
    assert report["copied_nbytes"] >= 4 * 4 + 4 * 4 + 8 + 4
    before = client.do(buffers)
    assert client.do(train) == [True, 1.0, 1]
    assert producer.do(train) == [True, 1.0, 1]
    assert client.do(train) == [True, 2.0, 2]
    later.do(worker.attach, cfg=normed)
    assert later.do(buffers) == before
    assert client.do(worker.verify) == []


# ---- class attributes (D5) ---------------------------------------------------------------------------------------------------


def layout_of_class(here):
    return plain_models.Layer.layout


@pytest.mark.parametrize("aged", [False, True])
def test_a_class_attribute_that_the_load_changed_is_restored(aged, workers, daemon, tmp_path, wait_until):
    cfg = {
        "checkpoint": plain_models.save(plain_models.Layered, tmp_path / "layered.safetensors"),
        "build": "support.plain_models:Layered",
        "finalize": "support.plain_models:set_class_attribute",
    }
    producer, client = workers.fresh(), workers.fresh()  # the change stays with the class
    if aged:  # then the producer begins under a provisional key, and makes the full one after the load
        wait_until(lambda: time.time() > os.stat(cfg["checkpoint"]).st_ctime + 2.1, what="the file's stat can be relied on")
    producer.do(worker.attach, cfg=cfg)
    assert client.do(layout_of_class) == "row"
    assert client.do(worker.attach, cfg=cfg)["source"] == "cache"
    assert client.do(layout_of_class) == "column"
    assert client.do(worker.output) == producer.do(worker.output)


# ---- F14 ---------------------------------------------------------------------------------------------------------------------


def attach_with_few_descriptors(here, *, cfg, limit):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return worker.attach(here, cfg=cfg)


def test_two_thousand_tensors_with_sixty_four_descriptors(workers, daemon, tmp_path):
    cfg = {
        "checkpoint": plain_models.save(plain_models.Deep, tmp_path / "deep.safetensors"),
        "build": "support.plain_models:Deep",
    }
    producer, client = workers.fresh(), workers.fresh()
    made = producer.do(attach_with_few_descriptors, cfg=cfg, limit=64)
    assert (made["published"], made["tensors"]) == (True, 2000)
    found = client.do(attach_with_few_descriptors, cfg=cfg, limit=64)
    assert (found["source"], found["tensors"]) == ("cache", 2000)
    assert client.do(worker.output) == producer.do(worker.output)
    assert client.do(worker.footprint)["memfds"] == 0, "a mapping needs no descriptor"


def test_a_client_with_no_descriptor_left_is_told_the_limit(workers, daemon, linked, wait_until):
    producer, client = workers(), workers.fresh()
    # Then the digest is remembered, and no file has to be opened but the socket and the segment.
    wait_until(lambda: time.time() > os.stat(linked["checkpoint"]).st_ctime + 2.1, what="the file's stat can be relied on")
    producer.do(worker.attach, cfg=linked)
    assert client.do(worker.attach, cfg=linked, name="warm")["source"] == "cache"
    error = client.fails(attach_at_the_limit, cfg=linked, on_unavailable="error")
    assert error.type == "FileLimitError"
    assert "ulimit -n" in error.text


def highest_descriptor():
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that lists
            os.fstat(number)
            found.append(number)
    return max(found)


def attach_at_the_limit(here, *, cfg, **options):
    """With one descriptor less than the socket and the segment need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = [os.open(os.devnull, os.O_RDONLY)]
    while fds[-1] < highest_descriptor():  # what was opened and closed before may have left gaps
        fds.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds[-1] + 2, hard))
    try:
        fds.append(os.open(os.devnull, os.O_RDONLY))
        os.close(fds.pop())
        return worker.attach(here, cfg=cfg, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for fd in fds:
            os.close(fd)
