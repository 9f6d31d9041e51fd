"""`python -m sparge_tools.zoo.convert KIND DIRECTORY FILE...`: write the directory of a model.

In its own process: the libraries' progress bars, memory and global settings stay there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .kinds import KINDS


def convert(kind: str, target: Path, files: Sequence[Path]) -> None:
    """Write the directory, and wait until its files are on the disk."""
    KINDS[kind].convert(files, target)
    for file in target.iterdir():
        with open(file, "rb+") as data:
            os.fsync(data.fileno())


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]), [Path(file).resolve() for file in sys.argv[3:]])
