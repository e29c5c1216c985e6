"""One process of ``torchwcache demo``: attach a model, compute, print one JSON line. Run as ``python -m``."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEQUENCES, TOKENS = 4, 32


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--make-tiny", action="store_true", help="write a small random model to the folder, and end")
    parser.add_argument("--reference", action="store_true", help="also load without torchwcache, and compute with that")
    parser.add_argument("--hold", action="store_true", help="stay attached until killed")
    args = parser.parse_args()
    if args.make_tiny:
        make_tiny(args.checkpoint)
        print("{}")
    else:
        attach(args.checkpoint, reference=args.reference, hold=args.hold)


def make_tiny(folder: str) -> None:
    """A two-layer Llama with random weights: for machines without the demo's real model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def attach(checkpoint: str, *, reference: bool, hold: bool) -> None:
    """Attach, compute, and say how it went."""
    started = time.perf_counter()
    architecture = import_everything(checkpoint)
    import_s = time.perf_counter() - started

    from torchwcache import ModelConfig, WeightCache

    started = time.perf_counter()
    attachment = WeightCache.attach(ModelConfig(checkpoint), fallback="error")
    seconds = time.perf_counter() - started
    with attachment as model:
        facts = {"report": attachment.report.as_dict(), "seconds": seconds, "import_s": import_s, "digest": digest(outputs(model))}
        if reference:
            started = time.perf_counter()
            plain = architecture.from_pretrained(checkpoint)
            facts |= {"reference_s": time.perf_counter() - started, "reference": digest(outputs(plain))}
        print(json.dumps(facts), flush=True)
        if hold:
            sys.stdin.read()


def import_everything(checkpoint: str) -> Any:
    """Import what a start needs in any case, so that the times after it are the weights' alone; returns the model's class."""
    import accelerate  # noqa: F401 - Transformers imports it at the first load
    import transformers

    import torchwcache.attaching  # noqa: F401 - imported by the first attach
    from torchwcache.plugins import ADAPTERS

    ADAPTERS.get("nn")
    with open(os.path.join(checkpoint, "config.json")) as file:
        return getattr(transformers, json.load(file)["architectures"][0])


def outputs(model: torch.nn.Module) -> torch.Tensor:
    """What the model makes of some fixed tokens: an embedding for each sequence, or logits."""
    import torch

    tokens = torch.randint(100, 900, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    result: torch.Tensor = found.logits if "logits" in found else found.last_hidden_state.mean(dim=1)
    return result


def digest(tensor: torch.Tensor) -> str:
    """Equal digests mean equal bits."""
    import torch

    return hashlib.sha256(bytes(tensor.contiguous().view(torch.uint8).numpy())).hexdigest()


if __name__ == "__main__":
    main()
