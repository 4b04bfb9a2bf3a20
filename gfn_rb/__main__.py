"""The command line as ``python -m gfn_rb``."""

import sys

from gfn_rb.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
