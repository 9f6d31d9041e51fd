"""`python -m sparge` is the console program `sparge`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
