"""How the tests of the command line run it."""

from __future__ import annotations

import json

from sparge.backends.reference import stages as reference_stages
from sparge.cli import main

BENCH = ["bench", "--lengths", "256", "--heads", "2", "--repeat", "1"]
EXPLAIN = ["explain", "--shape", "1,8,1024,64"]
WHY = "needs a full moon"


def attend_wrongly(*args, **kwargs):
    done = reference_stages.attend(*args, **kwargs)
    return done._replace(out=done.out * 1.001)


def run_text(argv, capsys, code=0):
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def run_json(argv, capsys, code=0):
    return json.loads(run_text([*argv, "--json"], capsys, code))


def complaint(argv, capsys, code=2):
    """What stderr says; nothing may reach stdout, and a mistake takes one line."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparge: error: ")
    assert "Traceback" not in err
    assert code != 2 or err.count("\n") == 1
    return err
