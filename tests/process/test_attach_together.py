"""Many processes that start at once: one disk read, one entry, one daemon."""

from __future__ import annotations

import os
import time
from collections import Counter

import psutil
import pytest
from support import worker


def daemons_at(path):
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if path in (process.info["cmdline"] or []) and "torchwcache.daemon" in (process.info["cmdline"] or [])
    ]


def test_one_process_publishes_and_the_next_attaches(workers, daemon, linked):
    producer, client, plain = workers.several(3)
    first, second = producer.do(worker.attach, cfg=linked), client.do(worker.attach, cfg=linked)
    plain.do(worker.load_without_us, cfg=linked)
    assert (first["source"], first["published"]) == ("disk", True)
    assert (second["source"], second["published"]) == ("cache", False)
    assert first["fingerprint"] == second["fingerprint"]
    assert second["warnings"] == []
    assert {p.do(worker.output) for p in (producer, client, plain)} == {plain.do(worker.output)}
    assert producer.do(worker.picture) == client.do(worker.picture) == plain.do(worker.picture)


def test_eight_processes_on_a_cold_cache(workers, private_socket, linked):
    crew = workers.several(8)
    for one in crew:
        one.begin(worker.attach, cfg=linked)
    reports = [one.result() for one in crew]
    assert Counter(report["published"] for report in reports) == {True: 1, False: 7}
    assert Counter(report["source"] for report in reports)["disk"] == 1
    assert {report["source"] for report in reports} <= {"disk", "waited", "cache"}
    assert {report["fingerprint"] for report in reports} == {reports[0]["fingerprint"]}
    assert len({one.do(worker.output) for one in crew}) == 1
    (entry,) = crew[0].do(worker.entries)
    assert entry["leases"] == 8
    assert len(daemons_at(private_socket)) == 1


@pytest.mark.parametrize("at", ["load", "capture", "publish"])
def test_whoever_comes_late_waits_too(at, workers, daemon, linked, tmp_path, wait_until):
    """The producer began under a provisional key; those who come once it has hashed the files ask by the digest."""
    wait_until(lambda: time.time() > os.stat(linked["checkpoint"]).st_ctime + 2.1, what="the file's stat can be relied on")
    producer, client = workers.several(2)
    release = tmp_path / "go"
    producer.begin(worker.attach_and_stop, at=at, release=str(release), cfg=linked)
    producer.wait_for(at)
    client.begin(worker.attach, cfg=linked)
    with daemon.connect() as connection:
        wait_until(lambda: connection.status().waiting == 1, what="the client waits instead of loading")
    release.touch()
    assert producer.result()["published"]
    report = client.result()
    assert (report["source"], report["published"]) == ("waited", False)
    assert client.do(worker.output) == producer.do(worker.output)


def attach_in_threads(here, *, cfg, dtypes):
    """Attach one checkpoint in several threads at once, each in a dtype of its own: what each got, and what is left of it."""
    import threading

    import torch

    found, start = {}, threading.Barrier(len(dtypes))

    def one(dtype):
        start.wait(30)
        attachment = worker.WeightCache.attach(worker.config({**cfg, "dtype": dtype}))
        found[dtype] = sorted({str(tensor.dtype) for tensor in attachment.model.parameters()})
        attachment.close()

    threads = [threading.Thread(target=one, args=(dtype,)) for dtype in dtypes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"found": found, "default": str(torch.get_default_dtype()), "device": str(torch.nn.Linear(1, 1).weight.device)}


def test_threads_do_not_get_each_others_dtype(workers, daemon, tmp_path):
    # Transformers sets the default dtype of the process while it builds and loads.
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=24, num_attention_heads=2, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    dtypes = ["bfloat16", "float32", "float16"]
    for one in workers.several(2):  # as the producer, and as a client
        seen = one.do(attach_in_threads, cfg={"checkpoint": str(tmp_path)}, dtypes=dtypes)
        assert seen["found"] == {dtype: [f"torch.{dtype}"] for dtype in dtypes}
        assert (seen["default"], seen["device"]) == ("torch.float32", "cpu")
    assert len(one.do(worker.entries)) == len(dtypes)
