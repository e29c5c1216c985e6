"""A real vLLM engine, as a user's program starts one; prints what it did as JSON on the last line of its output.

Run as a script, with a JSON object as its one argument: ``model``, ``options`` for ``vllm.LLM``, ``prompts`` (lists of token ids),
``tokens`` (how many to make), and ``wait`` (stay up until a line comes in).
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    order = json.loads(sys.argv[1])
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
        return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, sampling, use_tqdm=False)]

    def say(**facts: object) -> None:
        print("RESULT " + json.dumps(facts), flush=True)

    say(tokens=generate(), seconds=seconds, pid=os.getpid())
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
        else:
            break


if __name__ == "__main__":
    main()
