"""The real SGLang starts from the cache: the same tokens, no weight file opened, all ranks of one mind."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import adapter, without
from sglang_running import EngineDied, OpenedFiles

pytestmark = pytest.mark.timeout(600)

TWO_RANKS: dict[str, Any] = {"env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, "tp_size": 2}


def weights_of(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


@pytest.fixture
def model(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(checkpoints / "dense", tmp_path / "model"))


@pytest.mark.parametrize("kind", ["tied", "moe", "mla"])
def test_a_second_start_maps_what_the_first_one_published(cache: Any, checkpoints: Path, kind: str) -> None:
    model = checkpoints / kind
    with cache.start(model) as first:
        tokens = first.started()
        assert [line.what for line in first.lines] == ["miss"], first.said
        assert first.lines[0].published, first.lines[0].text
    with OpenedFiles(*weights_of(model)) as opened, cache.start(model) as second:
        assert second.started() == tokens
        assert [line.what for line in second.lines] == ["hit"], second.said
        assert not opened.look()


def test_dense_with_and_without_the_cache_and_what_may_differ_between_two_starts(
    cache: Any, model: Path, checkpoints: Path
) -> None:
    """Off is off; requests may be longer, more, or elsewhere, and a copy of the checkpoint is the same checkpoint."""
    with OpenedFiles(*weights_of(model)) as opened, cache.start(model, mode="") as plain:
        tokens = plain.started()
        assert not plain.lines
        assert opened.look(), "the watch sees nothing"
    assert not cache.socket.exists()
    with cache.start(model, mode="", model_loader_extra_config=json.dumps({"torchwcache": {"mode": "daemon"}})) as first:
        assert first.started() == tokens
        assert first.lines[0].published, first.said
    other = {
        "context_length": 128,
        "max_total_tokens": 2048,
        "max_running_requests": 2,
        "mem_fraction_static": 0.4,
        "random_seed": 7,
        "schedule_policy": "fcfs",
        "served_model_name": "another",
        "log_level_http": "warning",
        "disable_radix_cache": True,
        "stream_interval": 3,
    }
    with OpenedFiles(*weights_of(model)) as opened, cache.start(model, mode="client", **other) as second:
        assert second.started() == tokens
        assert second.lines[0].what == "hit", second.said
        assert not opened.look()
    # The same content in another folder: another slot, but one entry.
    with cache.start(checkpoints / "dense", mode="client") as third:
        assert third.started() == tokens
        assert third.lines[0].what == "hit", third.said


def test_what_changes_the_model_is_a_miss_that_says_in_what(cache: Any, model: Path, checkpoints: Path) -> None:
    with cache.start(model) as first:
        tokens = first.started()
    override = json.dumps({"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    with cache.start(model, json_model_override_args=override) as second:
        assert second.started() != tokens
        assert second.lines[0].published, second.said
        assert "rope_theta" in second.said
    # Rewritten in place, at the same size: another fine-tune.
    shutil.copy(checkpoints / "other" / "model.safetensors", model / "model.safetensors")
    with cache.start(model, env={"TORCHWCACHE_FALLBACK": "error"}) as third:
        assert "checkpoint.content" in third.failed()


def test_two_ranks_are_of_one_mind(cache: Any, checkpoints: Path) -> None:
    model = checkpoints / "moe"
    with cache.start(model, **TWO_RANKS) as first:
        tokens = first.started()
        assert [(line.rank, line.what, line.published) for line in first.lines] == [(0, "miss", True), (1, "miss", True)], (
            first.said
        )
    with OpenedFiles(*weights_of(model)) as opened, cache.start(model, **TWO_RANKS) as second:
        assert second.started() == tokens
        assert [line.what for line in second.lines] == ["hit", "hit"], second.said
        assert not opened.look()
    entries = json.loads(cache.command("status", "--json"))["entries"]
    lost = next(entry for entry in entries if "tp1/2" in entry["slot"])
    cache.command("evict", lost["key"])
    with cache.start(model, **TWO_RANKS) as third:
        assert third.started() == tokens
        assert [line.rank for line in third.lines] == [0, 1]
        assert "miss" in {line.what for line in third.lines}, third.said
    with cache.start(model, **TWO_RANKS) as fourth:
        assert fourth.started() == tokens
        assert [line.what for line in fourth.lines] == ["hit", "hit"], fourth.said


def test_two_pipeline_stages(cache: Any, checkpoints: Path) -> None:
    stages = {**TWO_RANKS, "tp_size": 1, "pp_size": 2}
    with cache.start(checkpoints / "dense", **stages) as first:
        tokens = first.started()
        assert all(line.published for line in first.lines), first.said
    with cache.start(checkpoints / "dense", **stages) as second:
        assert second.started() == tokens
        assert [(line.rank, line.what) for line in second.lines] == [(0, "hit"), (1, "hit")], second.said


def test_weights_are_not_written_while_they_are_shared(cache: Any, checkpoints: Path) -> None:
    model = checkpoints / "dense"
    for what in ("miss", "hit"):
        with cache.start(model) as engine:
            tokens = engine.started()
            assert engine.lines[0].what == what
            for name, arguments in (
                ("update_weights_from_disk", {"model_path": str(checkpoints / "other")}),
                ("begin_weight_update", {}),
            ):
                answer = engine.call(name, **arguments)
                assert "is refused" in answer["result"], answer
                assert answer["result"].startswith("(False")
            time.sleep(1)  # SGLang answers shortly before it counts itself idle, and ends when memory is asked back in between
            for name in ("release_memory_occupation", "resume_memory_occupation"):
                for tags in (None, ["weights"]):
                    answer = engine.call(name, tags=tags)
                    assert f"RefusedError: {name} is refused for 'weights'" in answer["error"], answer
                assert engine.call(name, tags=["kv_cache", "cuda_graph"]) == {"result": "None"}
            assert engine.call("get_server_info")["result"].count("'torchwcache': {'weights': 'shared'}") == 1
            assert engine.generate() == tokens


def test_an_adapter_beside_shared_weights_answers_as_beside_ones_own(cache: Any, checkpoints: Path, tmp_path: Path) -> None:
    model = checkpoints / "dense"
    paths = {"tuned": str(adapter(model, tmp_path / "adapter"))}
    lora = {"lora_paths": paths, "lora_backend": "torch_native", "env": {"TEST_WITHOUT_PINNING": "1"}}
    with cache.start(model, mode="", **lora) as plain:
        base = plain.started()
        tuned = plain.generate(lora_path="tuned")
        assert tuned != base
    for what in ("miss", "hit"):
        with OpenedFiles(*weights_of(model)) as opened, cache.start(model, **lora) as engine:
            assert engine.started() == base
            assert [line.what for line in engine.lines] == [what], engine.said
            assert engine.generate(lora_path="tuned") == tuned
            assert engine.generate() == base, "the adapter is not merged"
            assert bool(opened.look()) is (what == "miss")


def test_without_the_cache_weights_can_be_updated(cache: Any, checkpoints: Path) -> None:
    """The guards are about shared weights only: a model that was loaded without the cache is the engine's own."""
    with cache.start(checkpoints / "dense", mode="client") as engine:
        tokens = engine.started()
        assert "DaemonUnavailable" in engine.lines[0].text
        assert not engine.lines[0].published
        answer = engine.call("update_weights_from_disk", model_path=str(checkpoints / "other"))
        assert answer["result"].startswith("(True"), answer
        assert engine.generate() != tokens


def test_refusals_and_strays_stop_the_start_when_they_are_told_to(cache: Any, checkpoints: Path) -> None:
    strict = {"TORCHWCACHE_FALLBACK": "error"}
    with cache.start(checkpoints / "dense", env=strict, load_format="dummy") as engine:
        assert "DummyModelLoader (--load-format dummy) loads in a way of its own" in engine.failed()
    with cache.start(checkpoints / "dense", env=strict, enable_weights_cpu_backup=True) as engine:
        assert "--enable-weights-cpu-backup frees and restores weights" in engine.failed()
    # A plugin that was switched off cannot speak up, but SGLang does not know our options then.
    asked = json.dumps({"torchwcache": {"mode": "daemon"}})
    with cache.start(checkpoints / "dense", mode="", env={"SGLANG_PLUGINS": "another"}, model_loader_extra_config=asked) as engine:
        assert "torchwcache" in engine.failed()
    with cache.start(checkpoints / "dense", mode="client", env=strict) as engine:
        assert "DaemonUnavailable" in engine.failed()


def test_a_checkpoint_that_lacks_a_tensor_is_served_but_not_published(cache: Any, checkpoints: Path, tmp_path: Path) -> None:
    """SGLang says nothing of it. We do, the engine starts as it would have, and what it serves stays its own."""
    lacking = without(checkpoints / "dense", tmp_path / "lacking", "model.layers.1.self_attn.k_proj.weight")
    why = "does not hold them: model.layers.1.self_attn.qkv_proj.weight"
    for _ in range(2):  # the second one is told by the daemon
        with cache.start(lacking) as engine:
            assert len(engine.started()) == 2
            (line,) = engine.lines
            assert (line.what, line.published) == ("miss", False)
            assert why in line.text
            assert engine.call("update_weights_from_disk", model_path=str(checkpoints / "other"))["result"].startswith("(True")
    assert "lacking" not in cache.command("status")
    with cache.start(lacking, env={"TORCHWCACHE_FALLBACK": "error"}) as engine:
        assert why in engine.failed()


def test_kills(cache: Any, checkpoints: Path) -> None:
    """The daemon while an engine serves; an engine while it serves, and while it starts."""
    model = checkpoints / "dense"
    cache.command("daemon")
    with cache.start(model) as first:
        tokens = first.started()
        assert first.lines[0].published
        with cache.start(model) as second:
            assert second.started() == tokens
            assert second.lines[0].what == "hit"
            first.kill()
            assert second.generate() == tokens
            cache.command("stop")
            assert second.generate() == tokens
    with cache.start(model) as early:
        early.kill()
    with cache.start(model) as third:
        assert third.started() == tokens
        assert third.lines[0].published, third.said


@pytest.mark.parametrize("stage", ["load", "publish"])
def test_killed_in_the_middle(cache: Any, checkpoints: Path, stage: str) -> None:
    """Nothing half done is there for the next one, which loads and publishes."""
    cache.command("daemon")
    with cache.start(checkpoints / "dense", env={"TEST_DIE_IN": stage}) as engine:
        with pytest.raises(EngineDied):
            engine.started()
        assert not engine.lines
    assert "0 entries" in cache.command("status")
    with cache.start(checkpoints / "dense") as engine:
        engine.started()
        assert engine.lines[0].published, engine.said
    assert "1 entries" in cache.command("status")


def test_data_parallel_replicas_share_one_entry(cache: Any, checkpoints: Path) -> None:
    two = {"dp_size": 2, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    with cache.start(checkpoints / "dense", **two) as engine:
        tokens = engine.started()
        assert sum(line.published for line in engine.lines) == 1, engine.said
        # The other one waits for it, or is late enough to find it.
        assert sorted(line.what for line in engine.lines) in (["miss", "waited"], ["hit", "miss"])
    with cache.start(checkpoints / "dense", **two) as engine:
        assert engine.started() == tokens
        assert [line.what for line in engine.lines] == ["hit", "hit"], engine.said


def test_a_rank_that_dies_ends_the_start(cache: Any, checkpoints: Path) -> None:
    with cache.start(
        checkpoints / "dense", **{**TWO_RANKS, "env": {**TWO_RANKS["env"], "TEST_DIE_AT": "torchwcache_sglang.loader:1"}}
    ) as engine:
        with pytest.raises(EngineDied):
            engine.started()
        assert "another rank is gone" in engine.said
        assert not any(line.published for line in engine.lines)
    with cache.start(checkpoints / "dense", **TWO_RANKS) as engine:
        engine.started()
        assert all(line.published for line in engine.lines), engine.said
