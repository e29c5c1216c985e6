"""The command line. Importing it, ``--help``, and every command that only talks to the daemon import no torch."""

from torchwcache.cli.main import main

__all__ = ["main"]
