"""From one process to another through GPU memory: equal bits, ties, views, buffers, addresses, and what it costs a client."""

from __future__ import annotations

import fcntl

import pytest
import torch
from support import gpu_models, gpu_worker, worker

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_everything_arrives(workers, daemon, zoo):
    producer, client, plain = workers.several(3)
    made = producer.do(gpu_worker.attach, cfg=zoo)
    found = client.do(gpu_worker.attach, cfg=zoo)
    plain.do(gpu_worker.attach, cfg=zoo, mode="off")
    assert (made["source"], made["published"], made["warnings"]) == ("disk", True, [])
    assert (found["source"], found["warnings"]) == ("cache", [])

    expected = plain.do(gpu_worker.state)
    assert producer.do(gpu_worker.state) == expected
    assert client.do(gpu_worker.state) == expected
    assert client.do(worker.picture) == producer.do(worker.picture) == plain.do(worker.picture)
    assert client.do(gpu_worker.output) == producer.do(gpu_worker.output) == plain.do(gpu_worker.output)
    assert client.do(look_inside) == producer.do(look_inside) == plain.do(look_inside)
    assert client.do(look_inside)["tied"]

    plain.do(gpu_worker.attach, cfg={**zoo, "device": "cpu"}, mode="off", name="on the host")
    on_host = plain.do(gpu_worker.state, name="on the host")
    assert {path: facts[:5] for path, facts in expected.items()} == {path: facts[:5] for path, facts in on_host.items()}


def look_inside(here, *, name="model"):
    """What is one object, which flags were left, and where small tensors are."""
    module = here.models[name]
    views = [*module.conv_weights, module.parts["upper"], module.windows, module.again]
    return {
        "tied": module.head.weight is module.embed and module.parts["both"][1] is module.block.weight,
        "one storage": len({view.untyped_storage().data_ptr() for view in (module.block.weight, *views)}),
        "flags": [module.format_ue8m0, module.layout.name, module.input_scale, module.block.weight.scale_format],
        "devices": [str(t.device) for t in (module.limits, module.named["low"], module.named["nested"][0], module.w_kc)],
        "transient": sorted(module._non_persistent_buffers_set),
        "requires_grad": [path for path, parameter in module.named_parameters() if parameter.requires_grad],
    }


@pytest.mark.parametrize("who", ["producer", "client"])
def test_parameters_are_mapped_for_reading_and_buffers_are_private(who, workers, daemon, zoo):
    producer, client = workers.several(2)
    for one in (producer, client):
        one.do(gpu_worker.attach, cfg=zoo)
    one, other = (producer, client) if who == "producer" else (client, producer)
    found = one.do(gpu_worker.protections)
    buffers = {"seen", "mean", "mask", "angles"}
    assert {path for path, how in found.items() if how == "r"} == set(found) - buffers
    assert buffers <= set(found)

    before, answer = other.do(gpu_worker.state), other.do(gpu_worker.output)
    one.do(write_buffers)
    assert one.do(gpu_worker.output) != answer
    assert (other.do(gpu_worker.state), other.do(gpu_worker.output)) == (before, answer)
    third = workers()
    assert third.do(gpu_worker.attach, cfg=zoo)["source"] == "cache"
    assert third.do(gpu_worker.state) == before


def write_buffers(here, *, name="model"):
    module = here.models[name]
    with torch.no_grad():
        module.seen.add_(7)
        module.mean.copy_(torch.linspace(1, 2, len(module.mean)))
        module.mask.zero_()
        module.angles.mul_(2)
    torch.cuda.synchronize()


def test_what_is_published_by_hand(workers, daemon, zoo):
    publisher, client = workers.several(2)
    publisher.do(gpu_worker.attach, cfg=zoo, mode="off")
    publisher.do(change)
    before, answer = publisher.do(gpu_worker.state), publisher.do(gpu_worker.output)
    assert publisher.do(gpu_worker.publish, cfg=zoo, variant="changed")["published"]
    assert publisher.do(gpu_worker.state) == before
    assert publisher.do(gpu_worker.output) == answer, "it goes on working, on the published bytes"
    assert publisher.do(gpu_worker.protections)["block.weight"] == "r"

    assert client.do(gpu_worker.attach, cfg=zoo, variant="changed", fallback="error")["source"] == "cache"
    assert client.do(gpu_worker.state) == before
    assert client.do(gpu_worker.output) == answer
    assert client.do(merged_with) == "lora-7"


def change(here, *, name="model"):
    module = here.models[name]
    with torch.no_grad():
        module.block.weight.mul_(2)
        module.mean.add_(1)
    module.merged = "lora-7"


def merged_with(here, *, name="model"):
    return here.models[name].merged


def test_shared_storages_ties_and_views_published_by_hand(workers, daemon, big):
    cfg = {**big, "build_kwargs": {"layers": 12}}
    publisher, client = workers.several(2)
    publisher.do(gpu_worker.make, cfg=cfg)
    before, answer = publisher.do(gpu_worker.state), publisher.do(gpu_worker.output)
    assert before["layers.1.weight"][-2:] == [before["corner"][-2], 4 * MIB], "the two lie in one storage"
    publisher.do(gpu_worker.publish, cfg=cfg)
    client.do(gpu_worker.attach, cfg=cfg, variant="v")
    assert client.do(gpu_worker.state) == publisher.do(gpu_worker.state) == before
    assert client.do(gpu_worker.output) == publisher.do(gpu_worker.output) == answer


# ---- addresses ---------------------------------------------------------------------------------------------------------------


def test_addresses_are_those_of_the_producer(workers, daemon, wide):
    """In every fresh process, and for the producer from the load on; where the place is taken, anywhere else does as well."""
    producer, client, other = (workers.fresh() for _ in range(3))
    producer.do(gpu_worker.attach, cfg=wide)
    places, answer = producer.do(gpu_worker.addresses), producer.do(gpu_worker.output)
    for one in (client, other):
        assert one.do(gpu_worker.attach, cfg=wide)["same_addresses"] is True
        assert one.do(gpu_worker.addresses) == places
    again = client.do(gpu_worker.attach, cfg=wide, name="again")
    assert (again["source"], again["same_addresses"]) == ("cache", False)
    elsewhere = client.do(gpu_worker.addresses, name="again")
    assert not set(elsewhere.values()) & set(places.values())
    assert client.do(gpu_worker.output, name="again") == client.do(gpu_worker.output) == other.do(gpu_worker.output) == answer

    client.do(worker.close)
    assert client.do(gpu_worker.output, name="again") == answer, "the second does not lean on the first"
    assert client.do(gpu_worker.attach, cfg=wide, name="third")["same_addresses"] is True, "the place is free again"


def test_the_producers_addresses_do_not_move_at_the_commit(workers, daemon, wide):
    producer = workers()
    before, after = producer.do(attach_and_follow, cfg=wide)
    assert before == after
    assert len(before) == wide["build_kwargs"]["layers"]


def attach_and_follow(here, *, cfg):
    """Where the parameters lay when the message that commits was about to be sent, and where afterwards."""
    from torchwcache import producing

    places = []
    publish = producing.publish_module

    def look(captured, writer, *args, before_commit, **kwargs):
        def follow():
            places.append([parameter.data_ptr() for parameter in captured.module.parameters()])
            before_commit()

        return publish(captured, writer, *args, before_commit=follow, **kwargs)

    here.patch(producing, "publish_module", look)
    gpu_worker.attach(here, cfg=cfg)
    return [*places, [parameter.data_ptr() for parameter in here.models["model"].parameters()]]


# ---- descriptors and memory of a client --------------------------------------------------------------------------------------


def attach_and_measure(here, *, cfg, warm_up):
    """What this process uses before and after, and whether the descriptors that a producer sends would survive an exec."""
    from torchwcache.wire.client import DaemonConnection

    gpu_worker.attach(here, cfg=warm_up, name="warm up")
    gpu_worker.output(here, name="warm up")
    worker.close(here, name="warm up")
    sent = []
    commit = DaemonConnection.commit

    def look(self, request, fds):
        sent.extend(bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC) for fd in fds)
        return commit(self, request, fds)

    here.patch(DaemonConnection, "commit", look)
    before = gpu_worker.usage()
    report = gpu_worker.attach(here, cfg=cfg)
    after = gpu_worker.usage()
    grown = {name: after[name] - before[name] for name in before}
    return {"report": report, "grown": grown, "cloexec": sent, "segments": len(here.attachments["model"]._manifest.segments)}


def test_weights_cost_no_descriptors_and_nothing_of_torchs_memory(workers, daemon, wide, linked):
    """F14: many segments or one, a client and a producer hold one descriptor, the lease."""
    for source in ("disk", "cache"):
        found = workers().do(attach_and_measure, cfg=wide, warm_up=linked)
        assert (found["report"]["source"], found["report"]["mapped_nbytes"]) == (source, 160 * MIB)
        assert found["segments"] > 1
        assert found["grown"]["fds"] == 1
        assert found["grown"]["allocated"] < MIB
        assert found["grown"]["reserved"] <= 4 * MIB
        assert found["cloexec"] == ([True] * found["segments"] if source == "disk" else [])


def test_the_checkpoint_holds_what_it_should(zoo):
    """The test's own checkpoint: a dtype that is left out of it would be tested nowhere."""
    from safetensors.torch import load_file

    dtypes = {str(tensor.dtype) for tensor in load_file(zoo["checkpoint"]).values()}
    assert {"torch.float32", "torch.complex64", "torch.bool", "torch.float16", "torch.bfloat16", "torch.int64"} <= dtypes
    assert gpu_models.Zoo().empty.numel() == 0
