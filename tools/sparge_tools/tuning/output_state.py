"""What tuning by output has measured so far, in one file that the same request resumes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparge.support.atomic_files import replace_file
from sparge.support.json_text import parse_json, read_json_text

FORMAT = "sparge.tune.output/1"


class OutputState:
    """Results by kind and key, written after each; without a path they are kept in memory.

    asked: what every result depends on. The target is not part of it: a file serves any target.
    """

    def __init__(self, path: Path | None, asked: dict[str, Any]) -> None:
        self.path, self.asked = path, json.loads(json.dumps(asked))
        self._results: dict[str, Any] = {}
        if path is not None and path.is_file():
            self._results = self._read(path)

    def get(self, key: str) -> Any:
        """The result of a key, or None."""
        return self._results.get(key)

    def put(self, key: str, result: Any) -> Any:
        """Keep a result; it is on disk when this returns. Returns it as it would be read."""
        self._results[key] = json.loads(json.dumps(result))
        if self.path is not None:
            data = {"format": FORMAT, "asked": self.asked, "results": self._results}
            replace_file(self.path, f"{json.dumps(data)}\n".encode())
        return self._results[key]

    def delete(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            data = parse_json(read_json_text(path), "it")
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            differing = [
                name
                for name in {**self.asked, **data["asked"]}
                if self.asked.get(name) != data["asked"].get(name)
            ]
            if differing:
                raise ValueError(f"it is of another request: other {', '.join(differing)}")
            return dict(data["results"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} cannot be resumed: {error}; remove it to begin again, or name another "
                "state file"
            ) from None
