"""One start of a Transformers model, from the process's first instruction to its second token, stamped phase by phase.

``python benchmarks/_cuda_restart_worker.py WAY JSON`` prints one line of JSON. ``spawned`` is what the parent's clock said just
before it started this process: ``time.monotonic()`` is one clock for all processes of a machine.
"""

import time

FIRST_S = time.monotonic()  # before any other import: what went before is the interpreter's own start

import hashlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

PROMPT = 8


class Phases:
    """Seconds by phase, without gaps: each ends where the next one begins."""

    def __init__(self, spawned_s: float) -> None:
        self.seconds = {"interpreter": FIRST_S - spawned_s}
        self.at_s = FIRST_S

    def end(self, name: str, **parts: float) -> None:
        """End a phase now; ``parts`` of it are phases of their own, in their order, and the rest has that name."""
        now = time.monotonic()
        whole, self.at_s = now - self.at_s, now
        for part, seconds in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.seconds[name] = self.seconds.get(name, 0.0) + whole - sum(parts.values())


def start(way: str, folder: str, device: str, spawned: float) -> dict[str, Any]:
    phases = Phases(spawned)
    import torch

    phases.end("import_torch")
    import accelerate  # noqa: F401 - imported by the first load otherwise
    import transformers.models.qwen3.modeling_qwen3
    from transformers import AutoModelForCausalLM

    phases.end("import_transformers")
    if way != "disk":
        import torchwcache.attaching
        import torchwcache.loaders.huggingface
        import torchwcache_nn  # noqa: F401
        from torchwcache import ModelConfig, WeightCache

        if device != "cpu":
            import torchwcache.memory.cuda  # noqa: F401
        phases.end("import_torchwcache")
    torch.empty(1, device=device)
    if device != "cpu":
        torch.cuda.synchronize()
    phases.end("context")
    more: dict[str, Any] = {}
    if way == "disk":
        building = _timed_building(transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM)
        model = AutoModelForCausalLM.from_pretrained(folder, device_map=device, dtype="auto")
        _finish(device)
        phases.end("weights", build=building["seconds"])
    else:
        attachment = WeightCache.attach(ModelConfig(folder, device=device), mode="client", fallback="error")
        model = attachment.model
        report = attachment.report
        assert report.source == ("cache" if way == "cache" else "disk"), report
        assert way != "first" or report.published, report
        _finish(device)
        more = {"report": report.as_dict()}
        phases.end("other", **_parts(report.seconds))
    with torch.inference_mode():
        prompt = torch.arange(1, PROMPT + 1, device=device)[None]
        logits = model(prompt, use_cache=False).logits[:, -1]
        token = int(logits.argmax())
        phases.end("first_forward")
        until_first_s = phases.at_s - spawned
        model(torch.cat([prompt, logits.argmax(-1, keepdim=True)], -1), use_cache=False).logits[:, -1].argmax().item()
        phases.end("second_forward")
        digest = hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()
    return {
        "seconds": phases.seconds,
        "until_first_s": until_first_s,
        "token": token,
        "logits": digest,
        "finite": bool(logits.isfinite().all()),
        "distinct": int(logits.unique().numel()),
        "attention": model.config._attn_implementation,
        "nbytes": sum(parameter.nbytes for parameter in model.parameters()),
        "tensors": len(list(model.parameters())),
        **more,
    }


def _timed_building(kind: Any) -> dict[str, float]:
    """How long making the module takes inside ``from_pretrained``, which does not tell it apart."""
    found = {"seconds": 0.0}
    original = kind.__init__

    def timed(self: Any, *args: Any, **kwargs: Any) -> None:
        started = time.monotonic()
        original(self, *args, **kwargs)
        found["seconds"] += time.monotonic() - started

    kind.__init__ = timed
    return found


def _parts(seconds: dict[str, float]) -> dict[str, float]:
    """An attach's phases, as this benchmark shows them."""
    weights = ("connect", "wait", "load", "map", "rebind")
    publish = seconds.get("capture", 0.0) + seconds.get("publish", 0.0)
    return {
        "build": seconds["build"],
        "fingerprint": seconds["fingerprint"],
        "weights": sum(seconds.get(name, 0.0) for name in weights),
        **({"publish": publish} if publish else {}),
    }


def _finish(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def make_model(folder: str, device: str, gib: float) -> dict[str, Any]:
    """Write a Qwen3 of about so many GiB, with random weights that are made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    big = gib >= 2
    hidden, intermediate, vocabulary, heads, head = (2560, 9728, 151936, 32, 128) if big else (256, 768, 8000, 8, 32)
    layer = hidden * head * (2 * heads + heads // 2) + 3 * hidden * intermediate
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=max(1, -(-int(gib * 2**29 - 2 * vocabulary * hidden) // layer)),
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=head,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2GB")
    return {"layers": config.num_hidden_layers, "nbytes": sum(parameter.nbytes for parameter in model.parameters())}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    way, given = sys.argv[1], json.loads(sys.argv[2])
    found = make_model(**given) if way == "make_model" else start(way, **given)
    out.write(json.dumps(found) + "\n")
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
