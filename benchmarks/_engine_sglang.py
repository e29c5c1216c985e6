"""One real SGLang engine in a process of its own, stamped phase by phase from the process's first instruction to its first token.

``python benchmarks/_engine_sglang.py JSON`` prints lines of the form ``RESULT {json}`` among whatever SGLang's processes write to
the same output. ``spawned`` is what the parent's clock said just before it started this process: ``time.monotonic()`` is one clock
for all processes of a machine. With ``wait`` it then takes orders, one JSON object a line, and answers each with a line; the end of
its input ends it, and the engine with it.

What the seconds of ``engine`` are made of is in SGLang's own log, in the lines of :data:`LOG_LINES`.
"""

import time

FIRST_S = time.monotonic()  # before any other import: what went before is the interpreter's own start

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Literal  # noqa: E402

Way = Literal["disk", "cache", "own"]
"""From the files, from torchwcache (as the environment says), from SGLang's own weight cache (0.5.17 and newer)."""

GPU_OPTIONS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "disable_cuda_graph": True,
    "context_length": 256,
    "random_seed": 0,
    "mem_fraction_static": 0.3,
    "log_level": "info",
}
CPU_OPTIONS: dict[str, Any] = {
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

LOG_LINES = {
    "weights": r"Load weight end\. elapsed=(?P<seconds>[\d.]+) s, type=\w+, .*?avail mem=(?P<free_gb>[\d.]+) GB, "
    r"mem usage=(?P<gb>-?[\d.]+) GB",
    "before": r"Load weight begin\. avail mem=(?P<free_gb>[\d.]+) GB",
    "kv": r"KV Cache is allocated\. dtype: \S+ #tokens: (?P<tokens>\d+), K size: (?P<k_gb>[\d.]+) GB, V size: (?P<v_gb>[\d.]+) GB",
    "own_hit": r"\[IpcModelLoader\] Loaded model via IPC \(mode=client\), total=(?P<seconds>[\d.]+)s",
    "own_miss": r"\[IpcModelLoader\] Weight cache not available or config mismatch",
    "own_daemon_load": r"\[WeightCacheDaemon gpu=\d+ tp_rank=\d+\] Model loaded from disk in (?P<seconds>[\d.]+)s",
}
"""What SGLang 0.5.17 logs of a start, as regular expressions: each rank writes such lines, to the standard error it was given."""

OWN_SOCKET = Path("/tmp/sglang_weight_cache_rank0.sock")
OWN_READY = Path("/tmp/sglang_weight_cache_rank0.ready")
"""Where the daemon of SGLang's own weight cache listens, and the file that appears once it does (``pid=...`` in its first line).
The paths are built in (``srt/weight_cache/protocol.py``); only the client can be told another, by ``weight_cache_socket``."""


def own_daemon_command(model: str, options: Mapping[str, Any]) -> list[str]:
    """The command of SGLang's own weight cache daemon for an engine that is started with these options.

    It serves what it loads from :data:`OWN_SOCKET`, and refuses to start where :data:`OWN_READY` names a process that lives. With
    one rank the command is the daemon itself; with more it starts one daemon a rank. A daemon is killed when the *thread* that
    started it ends (``PR_SET_PDEATHSIG``): start it from the main thread. It exports memory by torch's CUDA IPC, so its environment
    must not ask for ``expandable_segments``. Whatever of its fingerprint differs (the model's path as it is written, dtype, layout,
    revision) makes the client load from disk and only log it: see ``own_miss``.
    """
    tp_size = int(options.get("tp_size", 1))
    dtype = str(options.get("dtype", GPU_OPTIONS["dtype"]))
    command = [sys.executable, "-m", "sglang.srt.weight_cache.daemon"]
    command += ["--model-path", model, "--dtype", dtype, "--tp-size", str(tp_size)]
    if tp_size == 1:
        command += ["--gpu-id", str(options.get("base_gpu_id", 0)), "--tp-rank", "0"]
    if options.get("quantization"):
        command += ["--quantization", str(options["quantization"])]
    return command


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What SGLang's own daemon and its clients get: neither reads a variable of its own; torchwcache is off."""
    left_out = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    kept = {name: value for name, value in environ.items() if name not in left_out and not name.startswith("TORCHWCACHE_")}
    return {**kept, "TORCHWCACHE_MODE": "off"}


def engine_options(way: Way, options: Mapping[str, Any]) -> dict[str, Any]:
    """All of the engine's options: the defaults for its device, what the order overrides, and what the way asks for."""
    defaults = CPU_OPTIONS if options.get("device") == "cpu" else GPU_OPTIONS
    own = {"weight_cache_mode": "client"} if way == "own" else {}
    return {**defaults, **own, **options}


class Phases:
    """Seconds by phase, without gaps: each ends where the next one begins."""

    def __init__(self, spawned_s: float) -> None:
        self.seconds = {"interpreter": FIRST_S - spawned_s}
        self.at_s = FIRST_S

    def end(self, name: str) -> None:
        """End a phase now."""
        now = time.monotonic()
        self.seconds[name], self.at_s = now - self.at_s, now


def say(**facts: object) -> None:
    """One line in one write: SGLang's processes write to the same output."""
    sys.stdout.flush()
    os.write(1, f"RESULT {json.dumps(facts)}\n".encode())


def generate(engine: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens; one prompt after the other, since how requests are batched changes the rounding."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    forget(engine)
    return [list(engine.generate(input_ids=[prompt], sampling_params=sampling)[0]["output_ids"]) for prompt in prompts]


def forget(engine: Any) -> None:
    """Empty the cache of prefixes: what is computed from one rounds in another way, so that a second answer could differ."""
    for _ in range(200):
        if getattr(engine.flush_cache(), "success", True):
            return
        time.sleep(0.05)  # SGLang answers shortly before it counts itself idle
    raise RuntimeError("the cache of prefixes was not emptied within 10 s")


def obey(engine: Any, command: Mapping[str, Any], order: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a line of the input asks for."""
    if command["do"] == "generate":
        return {"tokens": generate(engine, order["prompts"], order["tokens"])}
    try:
        return {"result": repr(getattr(engine, command["name"])(**command.get("kwargs", {})))}
    except Exception as error:  # the parent judges it
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    order = json.loads(sys.argv[1])
    phases = Phases(order["spawned"])
    import sglang

    phases.end("imports")
    engine = sglang.Engine(model_path=order["model"], **engine_options(order["way"], order.get("options", {})))
    phases.end("engine")
    engine.generate(input_ids=order["prompts"][:1], sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True})
    phases.end("first_token")
    until_first_s = phases.at_s - order["spawned"]
    tokens = generate(engine, order["prompts"], order["tokens"])
    info = engine.get_server_info()
    say(
        seconds=phases.seconds,
        until_first_s=until_first_s,
        tokens=tokens,
        kv_tokens=info["max_total_num_tokens"],
        memory_gb=info["internal_states"][0].get("memory_usage"),
        version=sglang.__version__,
        pid=os.getpid(),
    )
    for line in sys.stdin if order.get("wait") else ():
        command = json.loads(line)
        if command["do"] == "end":
            break
        say(**obey(engine, command, order))
    engine.shutdown()
    say(ended=True)


if __name__ == "__main__":  # SGLang's processes are spawned: each imports this file
    main()
