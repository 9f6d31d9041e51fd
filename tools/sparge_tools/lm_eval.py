"""EleutherAI's lm-eval with `attn_implementation=sparge`: `python -m sparge_tools.lm_eval`.

All arguments are lm-eval's. It has no plug-ins for attention, so sparge registers its own first,
in the same process.
"""

from __future__ import annotations

import sys
from importlib import import_module

from sparge import Unsupported

from .optional_libraries import need_libraries


def main() -> int:
    try:
        need_libraries("python -m sparge_tools.lm_eval cannot run", "lm_eval", extra="eval")
    except Unsupported as refusal:
        print(f"sparge: error: {refusal}", file=sys.stderr)
        return 3
    import_module("sparge.models.transformers")
    import_module("lm_eval.__main__").cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
