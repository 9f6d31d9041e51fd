"""The console program `sparge`: arguments in, exit codes out.

Exit codes: 0 success · 1 the command ran and the result is bad · 2 a mistake in the arguments ·
3 nothing here can serve the request · 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from .. import __version__
from ..support.errors import Unsupported
from ..support.tools_package import COMMANDS as TOOL_COMMANDS
from ..support.tools_package import need_tool

OK, BAD_RESULT, MISTAKE, UNSUPPORTED, INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = {
    "demo": "run real models, dense and sparse, and write a page: a long document, or --vision",
    "doctor": "show this machine, its backends, and run a self-check",
    "explain": "show which backend a call would use, and why the others would not serve it",
    "warm": "compile the GPU kernels of a model's attention ahead of its first call",
    "eval": "measure a model, dense and sparse: a language model, a pipeline, a module of the zoo",
    "trace": "save a model's queries, keys and values on real inputs, for tuning elsewhere",
    "tune": "find settings for every head under error bounds or a target of the output",
    "profile": "show, compare or check a tuned profile",
    "bench": "measure attention against torch's SDPA and FlexAttention, stage by stage",
}
TOOLS = ("demo", "warm", "eval", "trace", "tune", "bench")
"""Commands of the package sparge-tools."""


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def exit_code(work: Callable[[], int]) -> int:
    """Do the work; turn its exceptions into a message on stderr and an exit code."""
    try:
        return work()
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except Unsupported as refusal:
        return _complain(str(refusal), UNSUPPORTED)
    except BrokenPipeError:
        # The reader of a pipe left. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_RESULT
    except (ValueError, OSError) as mistake:
        return _complain(" ".join(str(mistake).split()), MISTAKE)


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _run(argv: list[str]) -> int:
    args = _parse(argv)
    if find_spec("rich") is None:
        raise ValueError(
            f"sparge {args.command} needs the package rich, which is not installed; "
            'install it with: pip install "sparge[cli]"'
        )
    code: int = args.run(args)
    return code


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="sparge", description="Sparse and quantized attention for PyTorch.")
    parser.add_argument("--version", action="version", version=f"sparge {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        if name in argv:  # import no other command
            module = (
                need_tool(TOOL_COMMANDS, name, what=f"sparge {name}")
                if name in TOOLS
                else import_module(f"{__name__}.{name}_command")
            )
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser.parse_args(argv)


def _complain(message: str, code: int) -> int:
    print(f"sparge: error: {message}", file=sys.stderr)
    return code
