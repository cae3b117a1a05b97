"""`python -m compressnas` is the command `compressnas`."""

import sys

from compressnas.cli import main

if __name__ == "__main__":
    sys.exit(main())
