"""One start of a real vLLM engine, stamped phase by phase: ``python benchmarks/_engine_vllm.py JSON``.

What it says are lines that begin with ``RESULT``; all else is vLLM's own output. With ``wait`` it stays up and does what each line
of its input says. ``spawned`` is what the parent's clock said just before it started this process.
"""

import time

FIRST_S = time.monotonic()  # before any other import: what went before is the interpreter's own start

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

ON_GPU = {"dtype": "bfloat16", "max_model_len": 512, "gpu_memory_utilization": 0.3, "enforce_eager": True}
ON_CPU = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True}


def say(**facts: Any) -> None:
    print("RESULT " + json.dumps(facts), flush=True)


def main() -> None:
    order = json.loads(sys.argv[1])
    seconds = {"interpreter": FIRST_S - order["spawned"]}
    at_s = FIRST_S

    def end(phase: str) -> None:
        nonlocal at_s
        seconds[phase] = time.monotonic() - at_s
        at_s = time.monotonic()

    import vllm
    from vllm import LLM, SamplingParams

    end("imports")
    usual = ON_CPU if order.get("device") == "cpu" else ON_GPU
    load_format = "torchwcache" if order["way"] == "cache" else "auto"
    options = {"skip_tokenizer_init": True, "seed": 0, "load_format": load_format, **usual, **order.get("options", {})}
    engine = LLM(model=order["model"], **options)
    end("engine")

    def generate(tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        # One after the other: how requests are batched changes the rounding.
        asked = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
        return [list(engine.generate([one], sampling, use_tqdm=False)[0].outputs[0].token_ids) for one in asked]

    generate(1)
    end("first_token")
    until_first_s = at_s - order["spawned"]
    cache = engine.llm_engine.vllm_config.cache_config
    blocks = cache.num_gpu_blocks
    say(
        seconds=seconds,
        until_first_s=until_first_s,
        tokens=generate(order["tokens"]),
        kv_tokens=blocks * cache.block_size if blocks else None,
        kv_block=cache.block_size,
        version=vllm.__version__,
        pid=os.getpid(),
    )
    for line in sys.stdin if order.get("wait") else ():
        command = json.loads(line)
        if command["do"] == "generate":
            say(tokens=generate(order["tokens"]))
        elif command["do"] == "call":
            try:
                result = getattr(engine, command["name"])(**command.get("kwargs", {}))
                say(result=repr(result))
            except Exception as error:  # whoever asked judges it
                say(error=f"{type(error).__name__}: {error}")
        else:
            break


if __name__ == "__main__":
    main()
