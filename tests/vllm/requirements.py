"""Print what the installed vLLM needs, but for torch (chosen before it) and its companions (not needed for text)."""

from __future__ import annotations

import importlib.metadata
import re
import sys

_NOT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main(distribution: str) -> None:
    for requirement in importlib.metadata.requires(distribution) or []:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name and name.group().lower() not in _NOT and "extra ==" not in requirement:
            print(requirement)


if __name__ == "__main__":
    main(sys.argv[1])
