"""EleutherAI's lm-eval with `attn_implementation=sparge` to choose: `python -m sparge.lm_eval`.

Every argument is lm-eval's own. It has no plug-ins for attention, so ours is registered first, in
the same process.
"""

from __future__ import annotations

import sys
from importlib import import_module

from .errors import Unsupported
from .evaluate.harness import require


def main() -> int:
    try:
        require("python -m sparge.lm_eval")
    except Unsupported as refusal:
        print(f"sparge: error: {refusal}", file=sys.stderr)
        return 3
    import_module("sparge.integrations.transformers")
    import_module("lm_eval.__main__").cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
