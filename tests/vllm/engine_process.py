"""A real vLLM engine, as a user's program starts one; prints what it did as JSON on the last line of its output.

Run as a script, with a JSON object as its one argument: ``model``, ``options`` for ``vllm.LLM``, ``prompts`` (lists of token ids),
``tokens`` (how many to make), ``wait`` (stay up and do what each line of the input says), ``stop_at``, ``plain_linear``,
``warm_up``, and ``adapter`` (a LoRA folder).
"""

from __future__ import annotations

import functools
import json
import operator
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def use_plain_linear() -> None:
    """Compute linear layers without oneDNN, whose packed weights nobody else can map: as on a GPU, weights stay what they are."""
    import torch
    from vllm.model_executor.layers import linear, utils

    # On a GPU it does nothing; here it gives the layers a function to call, also those of latent attention that are not packed.
    linear.UnquantizedLinearMethod.process_weights_after_loading = lambda self, layer: None

    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None
    utils.cpu_unquantized_gemm = lambda layer, x, weight, bias=None: torch.nn.functional.linear(x, weight, bias)


def warm_up() -> Callable[[], list[Any]]:
    """As on a GPU: hit or miss is decided before there is a model runner, and that listens which kernels layers want compiled.

    Gives what tells what it heard.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class Kernel(VllmJitKernel[int]):
        def get_warmup_keys(self, head_size: int, *, scale: float) -> list[int]:
            return [head_size]

        def compile(self, compile_key: int) -> None:
            pass

    kernel, runners = Kernel(), []
    make_layer, make_runner, load = Attention.__init__, CPUModelRunner.__init__, CPUModelRunner.load_model

    @functools.wraps(make_layer)
    def saying(self: Any, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any) -> None:
        make_layer(self, num_heads, head_size, scale, *args, **kwargs)
        kernel.register_warmup(head_size, scale=scale)

    def decided_before(self: Any, vllm_config: Any, device: Any) -> None:
        loader = get_model_loader(vllm_config.load_config)
        if vllm_config.load_config.load_format == "torchwcache":
            loader._decide(loader._start(vllm_config, vllm_config.model_config, ""))
        make_runner(self, vllm_config, device)
        runners.append(self)

    def listening(self: Any, *args: Any, **kwargs: Any) -> None:
        with self.jit_warmup_registry.activate():
            load(self, *args, **kwargs)

    Attention.__init__, CPUModelRunner.__init__, CPUModelRunner.load_model = saying, decided_before, listening
    return lambda: [call for runner in runners for call in runner.jit_warmup_registry._registrations.get(kernel, [])]


def stop_at(where: str) -> None:
    """Say so, and stand still, in the middle of a load or of a publish."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    import torchwcache.producing
    import torchwcache.production

    def standing_still(original: Any) -> Any:
        @functools.wraps(original)  # the adapter looks at how vLLM's functions are called
        def stand_still(*args: object, **kwargs: object) -> None:
            print("RESULT {}", flush=True)
            time.sleep(600)

        return stand_still

    if where == "load":
        DefaultModelLoader.load_weights = standing_still(DefaultModelLoader.load_weights)  # type: ignore[method-assign]
    else:
        torchwcache.production.encode_manifest = standing_still(torchwcache.production.encode_manifest)


def die_in_rank(rank: int) -> None:
    """In that rank, end the process when all ranks ask for their shards: in the middle of what they decide together."""
    from torchwcache.engine import RankStart

    original = RankStart._ask

    @functools.wraps(original)
    def ask(self: Any) -> None:
        if self.group.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self)

    RankStart._ask = ask  # type: ignore[method-assign]


def no_memory_in_rank(rank: int) -> None:
    """In that rank, have the publish fail: the others' shards are published all the same."""
    import torch.distributed as dist

    import torchwcache.production
    from torchwcache.errors import SegmentMemoryError

    original = torchwcache.production.encode_manifest

    @functools.wraps(original)
    def encode_manifest(*args: Any, **kwargs: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == rank:
            raise SegmentMemoryError("no memory in this rank", nbytes=1, available=0)
        return original(*args, **kwargs)

    torchwcache.production.encode_manifest = encode_manifest


if os.environ.get("TEST_NO_MEMORY_AT"):
    no_memory_in_rank(int(os.environ["TEST_NO_MEMORY_AT"]))
if os.environ.get("TEST_DIE_AT"):  # vLLM's workers import this file, too
    die_in_rank(int(os.environ["TEST_DIE_AT"]))


def main() -> None:
    order = json.loads(sys.argv[1])
    if order.get("plain_linear"):
        use_plain_linear()
    if order.get("stop_at"):
        stop_at(order["stop_at"])
    heard = warm_up() if order.get("warm_up") else list
    from vllm import LLM, SamplingParams

    options = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "dtype": "float32",
        "load_format": "torchwcache",
        "seed": 0,
        **order.get("options", {}),
    }
    start = time.monotonic()
    engine = LLM(model=order["model"], **options)
    seconds = time.monotonic() - start

    def generate() -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=order.get("tokens", 8), detokenize=False, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in order.get("prompts", [[1, 2, 3, 4], [7, 6, 5]])]
        # One after the other: how requests are batched changes the rounding.
        return [list(engine.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids) for prompt in prompts]

    def with_adapter(path: str) -> list[list[int]]:
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
        request = LoRARequest("adapter", 1, path)
        return [list(engine.generate([{"prompt_token_ids": [1, 2, 3, 4]}], sampling, lora_request=request)[0].outputs[0].token_ids)]

    def say(**facts: object) -> None:
        print("RESULT " + json.dumps(facts), flush=True)

    if options.get("pipeline_parallel_size", 1) > 1:
        # vLLM 0.32 allocates what pipeline ranks pass on in its first dummy run, which an eager engine on the CPU does not make.
        engine.collective_rpc("execute_dummy_batch")
    adapted = with_adapter(order["adapter"]) if order.get("adapter") else None
    say(tokens=generate(), adapted=adapted, seconds=seconds, pid=os.getpid(), heard=heard())
    for line in sys.stdin if order.get("wait") else ():
        command = json.loads(line)
        if command["do"] == "generate":
            say(tokens=generate())
        elif command["do"] == "call":
            try:
                result = getattr(engine, command["name"])(*command.get("args", []), **command.get("kwargs", {}))
                say(result=repr(result))
            except Exception as error:  # the caller judges it
                say(error=f"{type(error).__name__}: {error}")
        elif command["do"] == "call_in_workers":  # by what vLLM's engine core cannot know by name
            try:
                say(result=repr(engine.collective_rpc(operator.methodcaller(command["name"], *command.get("args", [])))))
            except Exception as error:  # likewise
                say(error=f"{type(error).__name__}: {error}")
        else:
            break


if __name__ == "__main__":
    main()
