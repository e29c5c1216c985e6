"""``python -m torchwcache``."""

import sys

from torchwcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
