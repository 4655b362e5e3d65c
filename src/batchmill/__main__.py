"""``python -m batchmill`` is the ``batchmill`` command."""

import sys

from batchmill.cli import main

if __name__ == "__main__":
    sys.exit(main())
