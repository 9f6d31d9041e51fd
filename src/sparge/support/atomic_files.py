"""Files are replaced at once or not at all."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` beside `path`, then rename it into place: nobody sees half a file."""
    target = Path(path).resolve()  # a link stays one; what it points to is replaced
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file, and not replaced by one", str(path))
    own = f"{os.getpid()}.{threading.get_ident()}"
    temporary = target.with_name(f".{target.name}.{own}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
