"""The fingerprint: what goes in, what is told when two differ (F2, F3, D7, D16)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchwcache.config import ModelConfig, Parallelism
from torchwcache.encoding import encode, to_bytes
from torchwcache.errors import EncodingError, FingerprintError
from torchwcache.identity.environment import environment_stamp
from torchwcache.identity.fingerprint import FieldDifference, Fingerprint, diff, fingerprint_of, slot_of


def make(value: int = 1) -> torch.nn.Module:
    return torch.nn.Linear(value, value)


def other(value: int = 1) -> torch.nn.Module:
    return torch.nn.Linear(value, value, bias=False)


BASE: dict[str, Any] = {"build": make, "build_kwargs": {"value": 2}, "dtype": "float32", "seed": 3}


def description(**changes: Any) -> Any:
    fields = {"fields": {"class": "m:C", "config": {"hidden": 8}}, "source": "/models/a", "quantization_config": None}
    return SimpleNamespace(**{**fields, **changes})


def fingerprint(
    *,
    cfg: dict[str, Any] | None = None,
    about: Any = None,
    environment: dict[str, Any] | None = None,
    content: tuple[str, str] = ("full", "00"),
    variant: str | None = None,
    loader: str = "1",
    adapter: str = "1",
    quantization: str = "unquantized",
) -> Fingerprint:
    return fingerprint_of(
        ModelConfig("/models/a", **{**BASE, **(cfg or {})}),
        about or description(),
        environment or {"torch": "2"},
        content=content,
        variant=variant,
        loader=SimpleNamespace(name="safetensors", version=loader),
        adapter=SimpleNamespace(name="nn", version=adapter),
        quantization=quantization,
    )


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "content": ("checkpoint.content", {"content": ("full", "01")}),
    "sampled": ("checkpoint.content", {"content": ("sampled", "00")}),
    "provisional": ("checkpoint.content", {"content": ("stat", "00")}),
    "class": ("model.class", {"about": description(fields={"class": "m:D", "config": {"hidden": 8}})}),
    "config": ("model.config.hidden", {"about": description(fields={"class": "m:C", "config": {"hidden": 9}})}),
    "build": ("code.build", {"cfg": {"build": other}}),
    "build_meta": ("code.build_meta", {"cfg": {"build_meta": other}}),
    "build_kwargs": ("build_kwargs.value", {"cfg": {"build_kwargs": {"value": 2.0}}}),
    "finalize": ("code.finalize", {"cfg": {"finalize": other}}),
    "code_version": ("code.version", {"cfg": {"code_version": "1"}}),
    "rope": ("overrides.rope_theta", {"cfg": {"overrides": {"rope_theta": 1e6}}}),
    "loader": ("loader", {"loader": "2"}),
    "adapter": ("adapter", {"adapter": "2"}),
    "dtype": ("dtype", {"cfg": {"dtype": "bfloat16"}}),
    "method": ("quantization.method", {"quantization": "block_fp8"}),
    "quantization": ("quantization.config", {"about": description(quantization_config={"bits": 8})}),
    "tp rank": ("parallel.tp_rank", {"cfg": {"parallel": Parallelism(tp_size=2, tp_rank=1)}}),
    "pp size": ("parallel.pp_size", {"cfg": {"parallel": Parallelism(pp_size=2)}}),
    "ep rank": ("parallel.ep_rank", {"cfg": {"parallel": Parallelism(ep_size=2, ep_rank=1)}}),
    "dp rank": ("parallel.dp_rank", {"cfg": {"parallel": Parallelism(dp_size=2, dp_rank=1, dp_matters=True)}}),
    "role": ("role", {"cfg": {"role": "draft"}}),
    "seed": ("seed", {"cfg": {"seed": None}}),
    "strict": ("strict", {"cfg": {"strict": False}}),
    "variant": ("variant", {"variant": "tuned"}),
    "ignore": ("ignore", {"cfg": {"ignore": {"a.*": "why"}}}),
    "constants": ("constants", {"cfg": {"constants": ("a.*",)}}),
    "environment": ("environment.torch", {"environment": {"torch": "3"}}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_everything_that_matters_makes_another_fingerprint(name: str) -> None:
    path, change = CHANGES[name]
    wanted, cached = fingerprint(**change), fingerprint()
    assert wanted.hex != cached.hex
    differing = [item.path for item in diff(wanted, cached)]
    assert any(item == path or item.startswith((f"{path}.", f"{path}[")) for item in differing), differing


def test_nothing_else_does() -> None:
    assert fingerprint() == fingerprint()
    assert fingerprint().hex == fingerprint(about=description(source="/elsewhere")).hex
    reordered = description(fields={"config": {"hidden": 8}, "class": "m:C"})
    assert fingerprint().hex == fingerprint(about=reordered).hex
    assert fingerprint().hex == fingerprint(cfg={"device": "cpu", "identity": "rehash"}).hex


def test_eight_data_parallel_replicas_are_one_entry_unless_the_rank_matters() -> None:
    replicas = {fingerprint(cfg={"parallel": Parallelism(dp_size=8, dp_rank=rank)}).hex for rank in range(8)}
    assert replicas == {fingerprint().hex}
    shards = {fingerprint(cfg={"parallel": Parallelism(dp_size=8, dp_rank=rank, dp_matters=True)}).hex for rank in range(8)}
    assert len(shards) == 8


def test_the_family_is_all_but_the_content() -> None:
    assert fingerprint().family == fingerprint(content=("stat", "ff")).family
    assert fingerprint().family != fingerprint(cfg={"dtype": "bfloat16"}).family


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("build_kwargs", {"cfg": {"build_kwargs": {"deep": [1, object()]}}}),
        ("overrides", {"cfg": {"overrides": {"x": lambda: 1}}}),
        ("model", {"about": description(fields={"config": {"x": torch.zeros(1)}})}),
        ("quantization", {"about": description(quantization_config={"x": object()})}),
    ],
)
def test_what_has_no_canonical_form_is_an_error_that_names_the_field(where: str, change: dict[str, Any]) -> None:
    with pytest.raises(FingerprintError, match=where) as caught:
        fingerprint(**change)
    assert where in caught.value.path


def test_torch_values_have_a_form() -> None:
    kwargs = {"dtype": torch.bfloat16, "size": torch.Size([1, 2]), "device": torch.device("cpu"), "layout": torch.strided}
    one = fingerprint(cfg={"build_kwargs": kwargs})
    two = fingerprint(cfg={"build_kwargs": {**kwargs, "dtype": torch.float16, "device": torch.device("meta")}})
    assert [str(item) for item in diff(one, two)] == [
        "build_kwargs.device: wanted device('cpu'), cached device('meta')",
        "build_kwargs.dtype: wanted torch.bfloat16, cached torch.float16",
    ]


def test_the_entrys_own_device_has_no_index() -> None:
    one = Fingerprint.from_fields({"device": torch.device("cuda:0")}, entry_device="cuda:0")
    two = Fingerprint.from_fields({"device": torch.device("cuda:1")}, entry_device="cuda:1")
    assert one == two
    assert one != Fingerprint.from_fields({"device": torch.device("cuda:1")}, entry_device="cuda:0")


def test_differences_are_readable() -> None:
    one = Fingerprint.from_fields({"a": 1, "b": {"c.d": True}, "list": [{"x": 1}, {"x": 2}], "gone": None, "pair": (1, 2)})
    two = Fingerprint.from_fields({"a": "1", "b": {"c.d": 1}, "list": [{"x": 1}, {"x": 3}], "new": 0.0, "pair": (1, 3)})
    assert [str(item) for item in diff(one, two)] == [
        "a: wanted 1, cached '1'",
        "b['c.d']: wanted True, cached 1",
        "gone: wanted None, cached absent",
        "list[1].x: wanted 2, cached 3",
        "new: wanted absent, cached 0.0",
        "pair: wanted (1, 2), cached (1, 3)",
    ]
    long = FieldDifference("x", "y" * 1000, "z")
    assert len(str(long)) < 300
    assert pickle.loads(pickle.dumps(long)) == long


def test_it_survives_the_daemon_and_hostile_bytes() -> None:
    one = fingerprint()
    assert Fingerprint.decode(one.encode()) == one
    for data in (b"", b"\xc1", one.encode()[:-1], to_bytes(encode([1, 2])), b"\x92" * 5000):
        with pytest.raises(EncodingError):
            Fingerprint.decode(data)


def test_it_is_the_same_in_every_process() -> None:
    script = (
        "from torchwcache.identity.fingerprint import Fingerprint as F\n"
        "print(F.from_fields({'s': {'x', 'y', 'z', 1, (2,)}, 'd': {'b': 1, 'a': frozenset('abc')}}).hex)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1


# ---- F2: what resolves an "auto" ---------------------------------------------------------------------------------------------


def test_what_decides_an_auto_is_part_of_the_environment() -> None:
    def stamp(**variables: str) -> Fingerprint:
        names = ("ENGINE_BACKEND",)
        return fingerprint(environment=environment_stamp("cpu", env_names=names, environ=variables))

    assert stamp() == stamp(UNRELATED="1")
    [difference] = diff(stamp(ENGINE_BACKEND="flash"), stamp())
    assert str(difference) == "environment.variables.ENGINE_BACKEND: wanted 'flash', cached None"


def test_flags_that_change_the_finished_state_count() -> None:
    before = environment_stamp("cpu")
    torch.set_default_dtype(torch.float64)
    try:
        assert environment_stamp("cpu")["flags"] != before["flags"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert "float32_matmul_precision" not in before["flags"]
    assert "float32_matmul_precision" in environment_stamp("cpu", computes=True)["flags"]


def test_versions_are_looked_up_without_importing() -> None:
    stamp = environment_stamp("cpu", packages=("msgspec", "no-such-distribution"))
    assert stamp["packages"]["no-such-distribution"] is None
    assert stamp["packages"]["msgspec"]
    assert stamp["device"] == {"kind": "cpu", "capability": None, "runtime": None}


# ---- F3: slots and devices ---------------------------------------------------------------------------------------------------


def test_ranks_of_different_jobs_are_different_slots() -> None:
    def slot(source: str = "/models/a", device: str = "cpu", adapter: str = "nn", **kwargs: Any) -> str:
        return slot_of(ModelConfig("x", **kwargs), description(source=source), device, adapter)

    slots = [
        slot(),
        slot(source="/models/b"),
        slot(device="GPU-1234"),
        slot(role="draft"),
        slot(adapter="vllm"),
        *(slot(parallel=Parallelism(tp_size=2, tp_rank=rank)) for rank in range(2)),
        *(slot(parallel=Parallelism(dp_size=2, dp_rank=rank)) for rank in range(2)),
    ]
    assert len(set(slots)) == len(slots)
    assert slot() == slot()
    assert slot(device="cpu") == slot(dtype="bfloat16", device="cpu")


def test_a_slot_fits_the_wire_whatever_the_path() -> None:
    one, two = (slot_of(ModelConfig("x"), description(source=f"/{name}" + "/long" * 2000), "cpu", "nn") for name in "ab")
    assert len(one) <= 4096
    assert one != two


def test_neither_fingerprint_nor_plugins_nor_hashing_import_torch() -> None:
    script = (
        "import sys, torchwcache.identity.fingerprint, torchwcache.identity.checkpoint, torchwcache.identity.code, "
        "torchwcache.identity.environment, torchwcache.plugins, torchwcache.loaders.registry, torchwcache.quantization.registry\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
