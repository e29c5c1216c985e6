"""What hashing a checkpoint costs at its first load: attaching as the producer with the digest unknown, and with it remembered.

``python benchmarks/hash_first_load.py [--quick] [--out FILE]`` writes its JSON to ``benchmarks/results/hash_first_load.json``. Each
attach runs in a process of its own, with an empty cache, on files in the page cache; imports are done before the clock starts.
The two kinds take turns, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _report import RESULTS, Report, Target, spread, write

MIB = 1 << 20
TARGET_PERCENT = 10.0
SETTLED_S = 2.5  # files that were touched just now have no provisional key: they would be hashed before the load

CASES = {
    "large": "plain module of 32 MiB tensors",
    "medium": "plain module of 3 MiB tensors",
    "small": "plain module of 192 KiB tensors",
    "converted": "plain module, float32 in the file and bfloat16 in memory",
    "transformers": "Transformers (Llama)",
}
WIDTHS = {"large": (4096, 2048), "medium": (1024, 768), "small": (256, 192), "converted": (4096, 2048)}


def build(shape: list[int], count: int) -> Any:
    import torch
    from torch import nn

    module = nn.Module()
    for i in range(count):
        module.register_parameter(f"w{i}", nn.Parameter(torch.zeros(shape), requires_grad=False))
    return module


def shape_and_count(case: str, nbytes: int) -> tuple[list[int], int]:
    shape = WIDTHS[case]
    return list(shape), max(1, nbytes // (4 * shape[0] * shape[1]))


# ---- in processes of their own -----------------------------------------------------------------------------------------------


def make(case: str, folder: str, nbytes: int) -> dict[str, Any]:
    import torch

    if case == "transformers":
        from transformers import LlamaConfig, LlamaForCausalLM

        layers = max(1, nbytes // (2 * 12 * 2048 * 2048))
        config = LlamaConfig(
            vocab_size=2048, hidden_size=2048, intermediate_size=5461, num_hidden_layers=layers, num_attention_heads=16
        )
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
        return {}
    from safetensors.torch import save_file

    shape, count = shape_and_count(case, nbytes)
    os.makedirs(folder)
    values = torch.empty(shape).uniform_()
    save_file({f"w{i}": values + i for i in range(count)}, f"{folder}/model.safetensors")
    return {}


def attach(case: str, folder: str, nbytes: int) -> dict[str, Any]:
    import torch  # noqa: F401

    import torchwcache.attaching  # noqa: F401
    from torchwcache import ModelConfig, WeightCache
    from torchwcache.adapters import ADAPTERS
    from torchwcache.loaders.registry import LOADERS

    ADAPTERS.get("nn")
    LOADERS.get("safetensors")
    WeightCache.connect(mode="client").evict(everything=True)
    if case == "transformers":
        import transformers.models.llama.modeling_llama  # noqa: F401

        LOADERS.get("huggingface")
        cfg = ModelConfig(folder)
    else:
        shape, count = shape_and_count(case, nbytes)
        kwargs = {"shape": shape, "count": count}
        cfg = ModelConfig(folder, build=build, build_kwargs=kwargs, dtype="bfloat16" if case == "converted" else None)
    before_cpu_s, before_s = time.process_time(), time.perf_counter()
    attachment = WeightCache.attach(cfg, mode="client", fallback="error")
    total_s, cpu_s = time.perf_counter() - before_s, time.process_time() - before_cpu_s
    with attachment:
        report = attachment.report
        assert report.published, report
        seconds = report.seconds
        return {
            "attach_s": total_s,
            "cpu_s": cpu_s,
            "load_s": seconds["load"],
            "load_and_hash_s": seconds["load"] + seconds["fingerprint"],
            "seconds": seconds,
        }


# ---- the benchmark -----------------------------------------------------------------------------------------------------------


def worker(function: str, environ: dict[str, str], *arguments: str | int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", function, json.dumps(arguments)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(report: Report, case: str, folder: Path, nbytes: int, repeats: int) -> None:
    """Attach as the producer, by turns with the digest unknown and remembered."""
    cache = folder / "cache"
    environ = {**os.environ, "TORCHWCACHE_SOCKET": str(folder / "s"), "XDG_CACHE_HOME": str(cache)}
    checkpoint = folder / case
    worker("make", environ, case, str(checkpoint), nbytes)
    time.sleep(SETTLED_S)
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    daemon = subprocess.Popen([sys.executable, "-m", "torchwcache.daemon", "--foreground"], env=environ, stderr=subprocess.DEVNULL)
    try:
        while not (folder / "s").exists() and daemon.poll() is None:
            time.sleep(0.01)
        found: dict[str, list[dict[str, Any]]] = {"hashed": [], "remembered": []}
        for turn in range(repeats + 1):  # the first one warms the page cache, and does not count
            for kind, runs in found.items():
                if kind == "hashed":
                    shutil.rmtree(cache, ignore_errors=True)
                result = worker("attach", environ, case, str(checkpoint), nbytes)
                if turn:
                    runs.append(result)
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(checkpoint)
    for kind, runs in found.items():
        report.add("run", case=case, digest=kind, nbytes=size, runs=runs)
    summary: dict[str, Any] = {"case": CASES[case], "nbytes": size}
    for what in ("load_and_hash_s", "attach_s", "cpu_s"):
        hashed, known = (spread([run[what] for run in found[kind]]) for kind in ("hashed", "remembered"))
        for name, least in (("min", hashed["min"] / known["min"]), ("median", hashed["median"] / known["median"])):
            summary[f"{what}_percent_{name}"] = round(100 * (least - 1), 1)
            summary[f"{what}_hashed_{name}"], summary[f"{what}_remembered_{name}"] = hashed[name], known[name]
    report.add("summary", **summary)
    for name in ("median", "min"):
        report.targets.append(
            Target(
                name=f"hashing adds to the load, {CASES[case]} ({name} of {repeats})",
                target=TARGET_PERCENT,
                measured=summary[f"load_and_hash_s_percent_{name}"],
                unit="%",
            )
        )
    # Processor time of the whole attach: what a machine that is busy with other things still tells.
    report.targets.append(
        Target(
            name=f"hashing adds to the processor time of an attach, {CASES[case]} (median of {repeats})",
            target=TARGET_PERCENT,
            measured=summary["cpu_s_percent_median"],
            unit="%",
        )
    )
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in summary.items()}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="256 MiB and three runs: whether it works, not how fast it is")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--mib", type=int, help="size of each checkpoint (default: 2048)")
    parser.add_argument("--repeats", type=int, help="how often each kind runs (default: 9)")
    parser.add_argument("--out", type=Path, default=RESULTS / "hash_first_load.json")
    parser.add_argument("--folder", help="where checkpoints are made (default: the folder for temporary files)")
    options = parser.parse_args()
    mib = options.mib or (256 if options.quick else 2048)
    repeats = options.repeats or (3 if options.quick else 9)
    report = Report("hash_first_load")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for case in options.cases:
            measure(report, case, Path(folder), mib * MIB, repeats)
    settings = {"mib": mib, "repeats": repeats, "cases": options.cases}
    write(options.out, report.as_dict(complete=not options.quick, options=settings))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps({"make": make, "attach": attach}[sys.argv[2]](*json.loads(sys.argv[3]))))
    else:
        main()
