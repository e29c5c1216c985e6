"""SGLang's loader without the rest of its engine: what a model is, down to the last bit, and what its fingerprint holds."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from checkpoints import block_fp8, eagle, without
from sglang_running import offline

pytestmark = pytest.mark.timeout(400)

REFUSED_SINCE = {"ple_offload_embedding": (0, 5, 20), "enable_paged_experts": (0, 5, 23), "startup_weight_load_mode": (0, 5, 18)}
"""Options that came with a release later than 0.5.17."""


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "mla"])
def test_what_is_attached_is_what_sglangs_own_loader_makes(cache: Any, checkpoints: Path, kind: str) -> None:
    """Module tree, tensors, storages and views, buffers, plain tensors, attributes; at the publisher and at a client."""
    env = cache.environment(TORCHWCACHE_MODE="daemon")
    first, second = (offline(env, "parity", model=str(checkpoints / kind)) for _ in range(2))
    assert (first["source"], first["published"], second["source"]) == ("disk", True, "cache")
    for found in (first, second):
        assert found["differences"] == []
        assert found["tensors"] > 20
        assert found["meta"] == []
        assert found["changed"] == ""
        # Private are rotary caches only: two of the sequences' length, or one where a kind needs one.
        assert found["copied"] <= 2 * 256 * 32 * 4
    assert first["preloaded"] == 0
    assert second["preloaded"] == second["mapped"] > 1_000_000
    if kind == "mla":
        assert {"w_kc", "w_vc"} <= set(second["plain"])


def test_block_wise_fp8_is_attached_as_sglangs_own_loader_makes_it(cache: Any, checkpoints: Path, tmp_path: Path) -> None:
    """Also where the config holds itself, which is how SGLang 0.5.17 leaves it."""
    env = cache.environment(TORCHWCACHE_MODE="daemon")
    model = str(block_fp8(checkpoints / "blocks", tmp_path / "fp8"))
    first, second = (offline(env, "block_fp8", model=model) for _ in range(2))
    assert (first["source"], first["published"], second["source"]) == ("disk", True, "cache")
    for found in (first, second):
        assert found["dtypes"] == ["bfloat16", "float32", "float8_e4m3fn"]
        assert (found["differences"], found["meta"], found["changed"]) == ([], [], "")
    assert second["preloaded"] == second["mapped"] > 1_000_000


@pytest.mark.parametrize(
    ("kind", "lacking", "unwritten"),
    [
        ("dense", "lm_head.weight", "lm_head.weight"),
        ("dense", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("moe", "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.w13_weight"),
        ("mla", "model.layers.1.self_attn.kv_b_proj.weight", "model.layers.1.self_attn.kv_b_proj.weight"),
    ],
)
def test_what_the_checkpoint_lacks_is_not_published(
    cache: Any, checkpoints: Path, tmp_path: Path, kind: str, lacking: str, unwritten: str
) -> None:
    """A whole tensor, a part of a fused one, one expert of many, and what attention derives more from."""
    model = without(checkpoints / kind, tmp_path / "lacking", lacking)
    found = offline(cache.environment(TORCHWCACHE_MODE="daemon"), "unwritten", model=str(model))
    assert (found["source"], found["published"]) == ("disk", False)
    (warning,) = found["warnings"]
    assert "the load left 1 of the model's tensors without values, in whole or in part" in warning
    assert f"does not hold them: {unwritten}. See whether" in warning
    assert found["nan"] == 0
    assert not found["own"]


def test_what_a_draft_gets_from_its_target_may_be_missing(cache: Any, checkpoints: Path, tmp_path: Path) -> None:
    env = cache.environment(TORCHWCACHE_MODE="daemon")
    model = str(checkpoints / "dense")
    draft = str(eagle(checkpoints / "dense", tmp_path / "draft"))

    def start(algorithm: str) -> dict[str, Any]:
        return offline(env, "draft_without_embedding", model=model, draft=draft, algorithm=algorithm)

    first, second, alone = start("EAGLE"), start("EAGLE"), start("STANDALONE")
    assert (first["published"], second["source"]) == (True, "cache")
    assert not alone["published"]
    assert "left 2 of the model's tensors without values" in alone["warnings"][-1]
    assert "model.embed_tokens.weight, lm_head.weight" in alone["warnings"][-1]


def test_a_draft_is_an_entry_of_its_own_and_shares_no_module_with_the_target(cache: Any, checkpoints: Path) -> None:
    env = cache.environment(TORCHWCACHE_MODE="daemon")
    first, second = (offline(env, "roles", model=str(checkpoints / "dense")) for _ in range(2))
    assert first["target"]["fingerprint"] != first["draft"]["fingerprint"]
    assert "|draft|" in first["draft"]["slot"]
    assert [found[role]["source"] for found in (first, second) for role in ("target", "draft")] == [
        "disk",
        "disk",
        "cache",
        "cache",
    ]
    for found in (first, second):
        assert found["shared"] == 0
        assert found["ropes"] == [["cpu"]]
        assert found["target has the registry's"]


def test_every_option_of_the_engine_counts_or_is_known_not_to(cache: Any, checkpoints: Path) -> None:
    """A new release's options fail here until somebody has looked at them; until then they count."""
    found = offline(cache.environment(), "options", model=str(checkpoints / "dense"))
    assert found["unknown"] == []
    assert found["wrongly neutral"] == []
    assert found["wrongly counting"] == []
    assert found["counting"] > 150
    assert found["neutral"] > 250


def test_every_option_that_is_refused_is_one_of_sglangs(cache: Any, checkpoints: Path) -> None:
    """A name that SGLang does not have would be refused in vain."""
    found = offline(cache.environment(TORCHWCACHE_MODE="client"), "refusals", model=str(checkpoints / "dense"))
    installed = tuple(int(number) for number in metadata.version("sglang").split(".")[:3])
    assert found["missing"] == sorted(name for name, since in REFUSED_SINCE.items() if installed < since)
    assert (found["before"], found["after"]) == (None, None)
    assert len(found["said"]) + len(found["missing"]) == 16
    for name, said in found["said"].items():
        assert said is not None, name
        assert "--" + name.replace("_", "-") in said
    assert found["pointer_head"] == (None if installed >= (0, 5, 23) else "no such attribute")


def test_what_else_the_fingerprint_holds(cache: Any, checkpoints: Path) -> None:
    found = offline(cache.environment(TORCHWCACHE_MODE="client"), "fingerprints", model=str(checkpoints / "dense"))
    base = found.pop("base")
    same = {name for name, value in found.items() if value == base}
    assert same == {"again", "longer", "extra", "threads", "SGLANG_PLUGINS"}
    others = [value for value in found.values() if value != base]
    assert len(set(others)) == len(others)


def test_a_release_that_loads_in_another_way_is_not_published(cache: Any, checkpoints: Path) -> None:
    found = offline(cache.environment(TORCHWCACHE_MODE="client"), "seams", model=str(checkpoints / "dense"))
    assert found["installed"] == ["", ""], found["version"]
    warning = "SGLang 0.6.0 is not one of those that torchwcache was written for (0.5.17 to 0.5.23)"
    assert found["newer, same loader"] == [warning, ""]
    assert found["newer is used"] == "CacheLoader"
    assert "is none that torchwcache knows" in found["newer, other loader"][1]
    assert found["it is not used"] == "DefaultModelLoader"
