"""SGLang's loader without its engine: published options, one rank, and models loaded through ``get_model_loader``.

Run as a script, with the name of a scenario and a JSON object of its arguments; prints the result as JSON on its last line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def set_up(model: str, *, dtype: str = "float32", **options: Any) -> Any:
    """What SGLang's scheduler does before it asks for a loader; returns the model's config."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    arguments = ServerArgs(
        model_path=model, device="cpu", attention_backend="torch_native", dtype=dtype, skip_tokenizer_init=True, **options
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=rendezvous)
    initialize_model_parallel()
    initialize_dp_attention(arguments)
    return ModelConfig(model, dtype=dtype)


def loader_for(config: Any, extra: Any = "{}", **changes: Any) -> Any:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    load_config = LoadConfig(load_format="auto", model_loader_extra_config=extra, tp_rank=0, **changes)
    return get_model_loader(load_config=load_config, model_config=config)


def load(loader: Any, config: Any) -> Any:
    from sglang.srt.configs.device_config import DeviceConfig

    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))


def adapter_of(loader: Any, config: Any) -> Any:
    from sglang.srt.configs.device_config import DeviceConfig

    from torchwcache_sglang.adapter import SGLangAdapter

    return SGLangAdapter(loader.inner, config, DeviceConfig("cpu", 0))


def block_fp8(model: str) -> dict[str, Any]:
    """``parity`` for block-wise FP8, as on a GPU: what SGLang does after loading on a CPU needs AMX, which few machines have.

    The config is as SGLang 0.5.17 leaves it once a model was built: it holds itself. Newer releases put that into a copy.
    """
    from sglang.srt.layers.quantization import fp8

    fp8._is_cpu = False
    config = set_up(model, dtype="bfloat16")
    stated = config.hf_config.quantization_config
    stated.update(hf_config=config.hf_config, packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    return compared(config)


def parity(model: str) -> dict[str, Any]:
    """Load through the cache and past it, in one process, and compare everything."""
    return compared(set_up(model))


def compared(config: Any) -> dict[str, Any]:
    """What is loaded through the cache, and how it differs from what is loaded past it."""
    from torchwcache.adapter import CaptureRules
    from torchwcache.module.parity import compare_modules
    from torchwcache.module.reachability import find_meta_tensors
    from torchwcache_sglang.registries import Registries

    loader = loader_for(config)
    cached = load(loader, config)
    with Registries().apart():
        fresh = load(loader.inner, config)
    rules = adapter_of(loader, config).rules(None, fresh)
    report = compare_modules(fresh, cached, rules=CaptureRules(ignore=rules.ignore))
    attachment = loader.attachment
    changed = "nothing was mapped"
    if attachment.report.mapped_nbytes:
        changed = ", ".join(attachment.verify())
    return {
        "source": attachment.report.source,
        "published": attachment.report.published,
        "differences": [str(difference) for difference in report.differences][:20],
        "tensors": report.tensors,
        "meta": find_meta_tensors(cached),
        "changed": changed,
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in cached.parameters()}),
        "mapped": attachment.report.mapped_nbytes,
        "copied": attachment.report.copied_nbytes,
        "preloaded": loader.preloaded_weights_bytes,
        "plain": sorted({name for module in cached.modules() for name in module.__dict__ if name.startswith("w_")}),
    }


def unwritten(model: str) -> dict[str, Any]:
    """Load a checkpoint that may lack something; what is said of it, and what the model is left with."""
    import torch

    config = set_up(model)
    loader = loader_for(config)
    module = load(loader, config)
    report = loader.attachment.report
    plain = [value for item in module.modules() for value in item.__dict__.values() if isinstance(value, torch.Tensor)]
    held = [*module.parameters(), *module.buffers(), *plain]
    return {
        "source": report.source,
        "published": report.published,
        "warnings": list(report.warnings),
        "nan": sum(bool(tensor.isnan().any()) for tensor in held if tensor.is_floating_point()),
        "own": "load_weights" in module.__dict__,
    }


def draft_without_embedding(model: str, draft: str, algorithm: str) -> dict[str, Any]:
    """A draft whose embedding and head are not in its checkpoint, under a method that does or does not take the target's."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_context

    set_up(model)
    get_context().override("test", speculative_algorithm=algorithm)
    asked = ModelConfig(draft, dtype="float32", is_draft_model=True)
    loader = loader_for(asked)
    load(loader, asked)
    report = loader.attachment.report
    return {"source": report.source, "published": report.published, "warnings": list(report.warnings)}


def roles(model: str) -> dict[str, Any]:
    """A target and a draft of one checkpoint in one process: entries of their own, and no rotary embedding without values."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT

    config = set_up(model)
    found = {}
    modules = {}
    for name, asked in (("target", config), ("draft", ModelConfig(model, dtype="float32", is_draft_model=True))):
        loader = loader_for(asked)
        modules[name] = load(loader, asked)
        report = loader.attachment.report
        found[name] = {"fingerprint": report.fingerprint, "slot": report.slot, "source": report.source}
    target = {id(item) for item in modules["target"].modules()}
    found["shared"] = sum(id(item) in target for item in modules["draft"].modules())
    found["ropes"] = [[str(buffer.device) for buffer in rope.buffers()] for rope in _ROPE_DICT.values()]
    found["target has the registry's"] = all(id(rope) in target for rope in _ROPE_DICT.values())
    return found


def options(model: str) -> dict[str, Any]:
    """Change each of the engine's options and see whether the fingerprint's part of it changes."""
    from sglang.srt.runtime_context import get_context, get_parallel, get_server_args

    from torchwcache.identity.fingerprint import Fingerprint
    from torchwcache_sglang.context import option_names, resolved_options
    from torchwcache_sglang.options import COUNTING, NEUTRAL

    set_up(model)
    source = str(Path(model).resolve())

    def digest() -> str:
        return Fingerprint.from_fields(resolved_options(source)).hex

    before = digest()
    names = option_names(get_server_args())
    counts, neutral = [], []
    for name in names:
        value = get_context().config_leaf(name)
        stamps = get_parallel()._stamp  # what process groups say goes before what was configured
        stamped = stamps.get(name)
        other = ("something else", str(value))
        get_context().override("test", **{name: other})
        if stamped is not None:
            stamps[name] = other
        (counts if digest() != before else neutral).append(name)
        get_context().override("test", **{name: value})
        if stamped is not None:
            stamps[name] = stamped
    assert digest() == before
    return {
        "unknown": sorted(set(names) - COUNTING - NEUTRAL),
        "gone": sorted((COUNTING | NEUTRAL) - set(names)),
        "wrongly neutral": sorted(set(neutral) & COUNTING),
        "wrongly counting": sorted(set(counts) & NEUTRAL),
        "counting": len(counts),
        "neutral": len(neutral),
    }


def refusals(model: str) -> dict[str, Any]:
    """Set one option after the other that is refused, where SGLang keeps it, and see what is said of it."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_context, get_parallel, get_server_args

    from torchwcache_sglang.context import option_names
    from torchwcache_sglang.refusals import OPTIONS, refusal

    config = set_up(model)
    draft = ModelConfig(model, dtype="float32", is_draft_model=True)
    inner = loader_for(config).inner
    names = [name for name in OPTIONS if name in option_names(get_server_args())]
    found: dict[str, Any] = {"missing": sorted(set(OPTIONS) - set(names)), "before": refusal(inner, draft), "said": {}}
    for name in names:
        value = get_context().config_leaf(name)
        other = {"dwdp_size": 2, "startup_weight_load_mode": "overlap"}.get(name, "something")
        stamps = get_parallel()._stamp  # what process groups say goes before what was configured
        get_context().override("test", **{name: other})
        stamped = stamps.get(name)
        if stamped is not None:
            stamps[name] = other
        found["said"][name] = refusal(inner, draft)
        get_context().override("test", **{name: value})
        if stamped is not None:
            stamps[name] = stamped
    found["after"] = refusal(inner, draft)
    found["pointer_head"] = getattr(config, "pointer_head", "no such attribute")
    return found


def fingerprints(model: str) -> dict[str, Any]:
    """The fingerprint with one thing after the other changed that is no option."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.eplb import expert_location

    from torchwcache.attaching import Attaching, AttachOptions
    from torchwcache.config import Policies
    from torchwcache_sglang.loader import model_config_for

    base = set_up(model)

    def of(config: Any = base, **changes: Any) -> str:
        loader = loader_for(config, **changes)
        cfg = model_config_for(config, "cpu", options=loader.options)
        asking = AttachOptions(socket=loader.options.socket, start=False, policies=Policies())
        attaching = Attaching(cfg, asking, adapter_of(loader, config))
        attaching.describe()
        return attaching.fingerprint(attaching.identity.compute()).hex

    class Placement:
        def __init__(self, experts: list[int]) -> None:
            import torch

            self.physical_to_logical_map_cpu = torch.tensor([experts])

    found = {
        "base": of(),
        "again": of(),
        "longer": of(ModelConfig(model, dtype="float32", context_length=128)),
        "extra": of(extra={"torchwcache": {"mode": "daemon"}}),
        "draft": of(ModelConfig(model, dtype="float32", is_draft_model=True)),
        "bfloat16": of(ModelConfig(model, dtype="bfloat16")),
        "rope": of(ModelConfig(model, dtype="float32", model_override_args='{"rope_theta": 77.0}')),
        "threads": of(extra={"num_threads": 2}),
    }
    for name, experts in (("placed", [0, 1, 2]), ("placed otherwise", [1, 0, 2])):
        real = expert_location.get_global_expert_location_metadata
        expert_location.get_global_expert_location_metadata = lambda experts=experts: Placement(experts)
        found[name] = of()
        expert_location.get_global_expert_location_metadata = real
    for name, value in (("SGLANG_PLUGINS", "torchwcache"), ("SGLANG_SOMETHING_NEW", "1")):
        os.environ[name] = value
        found[name] = of()
        del os.environ[name]
    return found


def seams(model: str) -> dict[str, Any]:
    """The installed release, and one that nobody has seen."""
    from sglang.srt.model_loader import loader as sglang_loader

    from torchwcache_sglang import seams as ours

    config = set_up(model)
    found: dict[str, Any] = {"installed": ours.check(), "version": ours.installed_version()}
    version = ours.installed_version
    ours.installed_version = lambda: "0.6.0"
    found["newer, same loader"] = ours.check()
    found["newer is used"] = type(loader_for(config)).__name__

    @staticmethod
    def postprocess_weights(model: Any, target_device: Any) -> None:
        """Does something new."""

    real = sglang_loader.DefaultModelLoader.__dict__["postprocess_weights"]
    sglang_loader.DefaultModelLoader.postprocess_weights = postprocess_weights
    found["newer, other loader"] = ours.check()
    found["it is not used"] = type(loader_for(config)).__name__
    sglang_loader.DefaultModelLoader.postprocess_weights = real
    ours.installed_version = version
    return found


_SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    "parity": parity,
    "block_fp8": block_fp8,
    "roles": roles,
    "unwritten": unwritten,
    "draft_without_embedding": draft_without_embedding,
    "options": options,
    "refusals": refusals,
    "fingerprints": fingerprints,
    "seams": seams,
}


if __name__ == "__main__":
    answer = _SCENARIOS[sys.argv[1]](**json.loads(sys.argv[2]))
    print("RESULT " + json.dumps(answer), flush=True)
