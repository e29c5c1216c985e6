"""Which weights SGLang's load never wrote: it leaves what the checkpoint lacks as the model's constructor left it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from torchwcache.module import unwritten
from torchwcache.module.unwritten import UNSEEN, Watch

__all__ = ["UNSEEN", "Watch", "given_by_target", "watched"]

_UNSET = {"weight_scale_inv": torch.finfo(torch.float32).min}
"""What SGLang puts into the scales of block FP8 before they are loaded."""


def watched(loader: Any) -> AbstractContextManager[Watch]:
    """Watch the one load that is done inside, in this thread.

    Args:
        loader: SGLang's module ``model_loader.loader``, whose ``_initialize_model`` builds the model; what SGLang then does with
            the weights begins with the model's ``load_weights``, in every known release.
    """
    return unwritten.watched(loader, "_initialize_model", unset=_UNSET)


def given_by_target(model: Any, algorithm: str) -> frozenset[str]:
    """Weights of a draft model in whose place SGLang puts those of the target once both are loaded.

    So does ``speculative/eagle_worker_v2.py``: it calls ``set_embed_and_head``, and for EAGLE-3 ``set_embed`` unless the draft asks
    for the target's head, too. Which parameters these are the model says itself.
    """
    given: list[Any] = []
    if algorithm in ("EAGLE", "NEXTN", "EAGLE3") and hasattr(model, "get_embed_and_head"):
        embed, head = model.get_embed_and_head()
        config = getattr(model, "config", None)
        hidden = getattr(config, "hidden_size", None)
        if algorithm != "EAGLE3" or getattr(model, "load_lm_head_from_target", False):
            given = [embed, head]
        elif getattr(config, "target_hidden_size", hidden) == hidden:
            given = [embed]
    return frozenset(name for name, tensor in model.named_parameters() if any(tensor is other for other in given))
