"""A real SGLang engine, as a user's program starts one. Takes orders, one JSON object a line, and answers each with a line.

Run as a script, with a JSON object as its one argument: ``model`` and ``options`` for ``sglang.Engine``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

ENGINE_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "chunked_prefill_size": -1,
    "context_length": 256,
    "random_seed": 0,
    "log_level": "info",
}
PROMPTS = [[3, 14, 15, 92, 65], [500, 7, 9]]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def die_in(stage: str) -> None:
    """End this process, which is one of SGLang's own, in the middle of a load or of a publish."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if stage == "publish":
        import torchwcache.production

        torchwcache.production.encode_manifest = die  # type: ignore[assignment]
        return
    from sglang.srt.model_loader import loader

    for name in [name for name in vars(loader) if name.endswith("safetensors_weights_iterator")]:
        setattr(loader, name, die)


class Unpinned:
    """torch, but for memory that is pinned."""

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("empty", "tensor", "zeros"):
            return found
        return lambda *arguments, pin_memory=False, **more: found(*arguments, **more)


def without_pinning() -> None:
    """SGLang pins memory for LoRA adapters whatever the device, and torch cannot without an accelerator: have it not pinned."""
    import torch
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = Unpinned()
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]


if __name__ == "__mp_main__":  # SGLang's processes import this file, too
    if os.environ.get("TEST_DIE_IN"):
        die_in(os.environ["TEST_DIE_IN"])
    if os.environ.get("TEST_WITHOUT_PINNING"):
        without_pinning()


def say(**facts: object) -> None:
    print("RESULT " + json.dumps(facts), flush=True)


def main() -> None:
    order = json.loads(sys.argv[1])
    import sglang

    start = time.monotonic()
    engine = sglang.Engine(model_path=order["model"], **{**ENGINE_OPTIONS, **order.get("options", {})})

    def generate(**how: object) -> list[list[int]]:
        # One after the other: how requests are batched changes the rounding.
        return [engine.generate(input_ids=[prompt], sampling_params=SAMPLING, **how)[0]["output_ids"] for prompt in PROMPTS]

    say(tokens=generate(), seconds=time.monotonic() - start, pid=os.getpid())
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "generate":
            say(tokens=generate(**command.get("how", {})))
        elif command["do"] == "call":
            try:
                say(result=repr(getattr(engine, command["name"])(**command.get("kwargs", {}))))
            except Exception as error:  # the caller judges it
                say(error=f"{type(error).__name__}: {error}")
        else:
            break
    engine.shutdown()
    say(ended=True)


if __name__ == "__main__":
    main()
