"""Which GPU it is, by whatever name (F24); torch's other allocator (F25); and a client in namespaces of its own (F15)."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from support import gpu_worker

from torchwcache.memory.select import memory_for

pytestmark = pytest.mark.gpu


def uuid_of(here, *, device):
    return memory_for(device).device_id


def allocate_and_free(here, *, device):
    """Have torch's allocator grow and shrink."""
    kept = [torch.full((1 << 20,), float(i), device=device) for i in range(64)]
    del kept[::2]
    torch.cuda.empty_cache()
    return all(bool((tensor == 2 * i + 1).all()) for i, tensor in enumerate(kept))


# ---- names -------------------------------------------------------------------------------------------------------------------


def test_one_gpu_under_two_names_is_one_entry(workers, daemon, linked):
    producer = workers.fresh(CUDA_VISIBLE_DEVICES="0")
    made = producer.do(gpu_worker.attach, cfg={**linked, "device": "cuda:0"})
    uuid = producer.do(uuid_of, device="cuda")
    client = workers.fresh(CUDA_VISIBLE_DEVICES=f"GPU-{uuid}")
    found = client.do(gpu_worker.attach, cfg={**linked, "device": "cuda"}, fallback="error")
    assert (found["source"], found["fingerprint"]) == ("cache", made["fingerprint"])
    (entry,) = client.do(gpu_worker.entries)
    assert (entry["device"], entry["leases"]) == (uuid, 2)
    assert client.do(gpu_worker.state) == producer.do(gpu_worker.state)


def test_with_and_without_a_number(workers, daemon, linked):
    producer, client = workers.several(2)
    made = producer.do(gpu_worker.attach, cfg={**linked, "device": "cuda"})
    found = client.do(gpu_worker.attach, cfg={**linked, "device": "cuda:0"}, fallback="error")
    assert (found["source"], found["fingerprint"], found["slot"]) == ("cache", made["fingerprint"], made["slot"])
    assert client.do(gpu_worker.output) == producer.do(gpu_worker.output)


def test_the_host_and_the_gpu_are_two_entries(workers, daemon, linked):
    producer, client = workers.several(2)
    producer.do(gpu_worker.attach, cfg=linked)
    found = client.do(gpu_worker.attach, cfg={**linked, "device": "cpu"})
    assert (found["source"], found["published"], found["warnings"]) == ("disk", True, [])
    assert sorted(entry["memory"] for entry in client.do(gpu_worker.entries)) == ["cuda", "memfd"]
    assert client.do(gpu_worker.attach, cfg=linked, name="too")["source"] == "cache"
    assert client.do(gpu_worker.output, name="too") == producer.do(gpu_worker.output)


def test_two_gpus_in_another_order(workers, daemon, linked):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    producer, client = workers.fresh(CUDA_VISIBLE_DEVICES="0,1"), workers.fresh(CUDA_VISIBLE_DEVICES="1,0")
    made = producer.do(gpu_worker.attach, cfg={**linked, "device": "cuda:0"})
    found = client.do(gpu_worker.attach, cfg={**linked, "device": "cuda:1"}, fallback="error")
    assert (found["source"], found["fingerprint"]) == ("cache", made["fingerprint"])
    assert client.do(gpu_worker.output) == producer.do(gpu_worker.output)

    other = client.do(gpu_worker.attach, cfg={**linked, "device": "cuda:0"}, name="other")
    assert (other["source"], other["published"], other["warnings"]) == ("disk", True, [])
    entries = producer.do(gpu_worker.entries)
    assert len({(entry["key"], entry["device"]) for entry in entries}) == 2
    assert {entry["device"] for entry in entries} == {producer.do(uuid_of, device=f"cuda:{i}") for i in range(2)}
    assert client.do(gpu_worker.output, name="other") == client.do(gpu_worker.output)
    assert producer.do(gpu_worker.attach, cfg={**linked, "device": "cuda:1"}, name="other")["source"] == "cache"


# ---- expandable segments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["producer", "client", "both"])
def test_expandable_segments(who, workers, daemon, big):
    cfg = {**big, "build_kwargs": {"layers": 24}}
    switch = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    producer = workers.fresh(**(switch if who != "client" else {}))
    client = workers.fresh(**(switch if who != "producer" else {}))
    producer.do(gpu_worker.make, cfg=cfg)
    before, answer = producer.do(gpu_worker.state), producer.do(gpu_worker.output)
    assert producer.do(gpu_worker.publish, cfg=cfg)["published"]
    assert client.do(allocate_and_free, device=big["device"])
    assert client.do(gpu_worker.attach, cfg=cfg, variant="v", fallback="error")["warnings"] == []
    for one in (producer, client):
        assert one.do(allocate_and_free, device=big["device"])
        assert (one.do(gpu_worker.state), one.do(gpu_worker.output)) == (before, answer)
        assert set(one.do(gpu_worker.protections).values()) == {"r"}
    assert client.do(gpu_worker.let_go) == []
    assert client.do(allocate_and_free, device=big["device"])
    assert producer.do(gpu_worker.output) == answer


# ---- namespaces --------------------------------------------------------------------------------------------------------------

UNSHARE = ["unshare", "--pid", "--ipc", "--mount", "--uts", "--net", "--fork", "--kill-child", "--mount-proc"]
OWN_MEMORY = ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]


def test_a_client_in_namespaces_of_its_own(workers, daemon, linked, wait_until):
    prefix = [*UNSHARE, *OWN_MEMORY]
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if tried.returncode != 0:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.strip()}")
    producer, client = workers(), workers.fresh(prefix=prefix)
    producer.do(gpu_worker.attach, cfg=linked)
    found = client.do(gpu_worker.attach, cfg=linked, fallback="error")
    assert (found["source"], found["warnings"]) == ("cache", [])
    assert client.do(own_pid) < 20, "it sees no process outside"
    assert (client.do(gpu_worker.state), client.do(gpu_worker.output)) == (
        producer.do(gpu_worker.state),
        producer.do(gpu_worker.output),
    )
    assert producer.do(gpu_worker.entries)[0]["leases"] == 2
    client.kill()
    wait_until(lambda: producer.do(gpu_worker.entries)[0]["leases"] == 1, what="its lease ends")


def test_a_producer_in_namespaces_of_its_own(workers, daemon, linked):
    prefix = [*UNSHARE, *OWN_MEMORY]
    if subprocess.run([*prefix, "true"], capture_output=True, timeout=60).returncode != 0:
        pytest.skip("namespaces cannot be made here")
    producer, client = workers.fresh(prefix=prefix), workers()
    assert producer.do(gpu_worker.attach, cfg=linked)["published"]
    answer = producer.do(gpu_worker.output)
    producer.kill()
    assert client.do(gpu_worker.attach, cfg=linked, fallback="error")["source"] == "cache"
    assert client.do(gpu_worker.output) == answer


def own_pid(here):
    return os.getpid()
