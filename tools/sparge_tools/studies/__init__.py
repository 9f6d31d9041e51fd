"""Programs for developers: `python -m sparge_tools.studies.NAME`.

targets          compare documents of `sparge bench --json` and `sparge eval --json` with targets
gpu_check        the conformance suite and the benchmark on a GPU, as one document to share
serve            time to first token and requests per second of a server, sparse and dense
ring             context parallelism over gloo processes
varlen           packed sequences beside one call each
token_orders     orders of visual tokens, and the density that each needs
reorder_cost     what permuting tokens costs
vision_defaults  recipes and orders on the large layers of a real model
auto_on_cards    where `auto` runs sparse attention, by GPU
scale_model      bytes and seconds of one layer over many devices, by a model
"""

from collections.abc import Callable, Sequence

from sparge.cli import exit_code


def study(run: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """The `main(argv=None)` of a study: an exit code, and mistakes on stderr. None: sys.argv."""

    def main(argv: Sequence[str] | None = None) -> int:
        return exit_code(lambda: run(argv))

    return main
