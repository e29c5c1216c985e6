"""Find the folder behind a checkpoint's name: a local folder, or a repo id in the Hugging Face cache. Imports no torch."""

from __future__ import annotations

import re
import time
from pathlib import Path

from torchwcache.config import ModelConfig
from torchwcache.errors import CheckpointNotFoundError

__all__ = ["FolderCache"]

_FRESH_S = 60.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What ``from_pretrained`` would read, and no more: a cache that it filled must be enough, also without a network.
_PATTERNS = ("config.json", "generation_config.json", "model*.safetensors", "model*.safetensors.index.json")
_CODE_PATTERNS = ("*.py",)


class FolderCache:
    """Resolves repo ids through huggingface_hub, and sticks to the answer for a minute.

    One attach asks several times (files, config, class, load); all must see one and the same snapshot, and only the first may
    cost a request.
    """

    def __init__(self) -> None:
        self._folders: dict[tuple[str, str | None, bool], tuple[Path, float]] = {}

    def folder(self, cfg: ModelConfig) -> Path:
        """The local folder.

        Raises:
            CheckpointNotFoundError: There is no such folder, and no such repo that can be reached or is in the cache.
        """
        path = Path(cfg.checkpoint)
        if path.is_dir():
            return path
        if path.exists() or path.is_absolute() or cfg.checkpoint.startswith(".") or cfg.checkpoint.count("/") > 1:
            what = "is not a folder" if path.exists() else "no such folder"
            raise CheckpointNotFoundError(
                f"{path}: {what}; a Transformers checkpoint is a folder with a config.json, or a repo id", path=str(path)
            )
        key = (cfg.checkpoint, cfg.revision, cfg.trust_remote_code)
        known = self._folders.get(key)
        if known is None or time.monotonic() - known[1] > _FRESH_S or not known[0].is_dir():
            known = self._folders[key] = (_snapshot(cfg), time.monotonic())
        return known[0]


def _snapshot(cfg: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [*_PATTERNS, *(_CODE_PATTERNS if cfg.trust_remote_code else ())]
    # A commit names its content: what is in the cache needs no question to the hub.
    pinned = cfg.revision is not None and _COMMIT.fullmatch(cfg.revision) is not None
    for local_only in (True, False) if pinned else (False,):
        try:
            return Path(
                snapshot_download(cfg.checkpoint, revision=cfg.revision, allow_patterns=patterns, local_files_only=local_only)
            )
        except (OSError, HFValidationError) as error:  # not in the cache, no network, no such repo, gated: all are OSErrors
            if not local_only:
                raise CheckpointNotFoundError(
                    f"{cfg.checkpoint}: neither a local folder nor a repo that can be reached or is in the Hugging Face cache: "
                    f"{error}",
                    path=cfg.checkpoint,
                ) from error
    raise AssertionError("unreachable")
