"""What ``save_pretrained`` writes, and what ``verify`` finds: orders for workers, and a look at the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from support.worker import Here, config, digest


def save_pretrained(here: Here, *, folder: str, name: str = "model") -> None:
    """Save a model."""
    model: Any = here.models[name]
    model.save_pretrained(folder)


def saved(folder: Path) -> dict[str, Any]:
    """Everything that ``save_pretrained`` wrote: tensors by their bits, and the configs."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                found[path.name] = {name: [digest(file.get_tensor(name)), list(file.get_tensor(name).shape)] for name in names}
        else:
            found[path.name] = json.loads(path.read_text())
    return found


def verified(here: Here, *, cfg: dict[str, Any]) -> dict[str, Any]:
    """Compare an entry with its checkpoint."""
    from torchwcache import WeightCache

    return WeightCache.connect().verify(config(cfg)).as_dict()
