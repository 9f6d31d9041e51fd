"""What the tests of wrong arguments of native ops share. A case makes valid ones, by name."""

from __future__ import annotations

import pytest
import torch

from native_calls import call


def tensors_of(valid):
    """Every tensor argument of the cases, as `(case, name)`."""
    return [
        (case, name)
        for case, make in valid.items()
        for name, x in make().items()
        if isinstance(x, torch.Tensor)
    ]


def refusals_of(valid):
    """A check that a case is refused with some of its arguments broken."""

    def refused(case, match, **broken):
        arguments = valid[case]()
        assert arguments.keys() >= broken.keys() - {"isa"}
        with pytest.raises(RuntimeError, match=match):
            call(case, arguments | broken)

    return refused
