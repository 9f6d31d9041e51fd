"""A plain module of the zoo and the task that measures it.

    loaded = sparge_tools.zoo.load_module("terrain-consistency-unet")
    for given in loaded.task.inputs(4, seed=0):
        dense = loaded.task.run(loaded.model, given)
        with sparge.accelerate(loaded.model, grid=loaded.grids):
            sparse = loaded.task.run(loaded.model, given)
        print(loaded.task.caption(given), loaded.task.compare(dense, sparse))

Whoever measures or shows a model needs this file only, not the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Picture = NDArray[np.uint8]

Grid = tuple[int, int, int]
"""Frames, rows and columns of visual tokens; tokens are in row-major order."""


class Task(Protocol):
    """What a model is for: inputs, one run, and how two results are compared.

    Tasks are frozen dataclasses. Their fields are the choices of the task, such as the size of the
    image; `dataclasses.replace` changes them. Results do not depend on anything but the model, the
    input and the attention.
    """

    @property
    def about(self) -> str:
        """One line: the input, the result, and what `compare` measures."""
        ...

    @property
    def metric(self) -> str:
        """The key of `compare` that decides whether a sparse result is good enough."""
        ...

    def inputs(self, n: int, seed: int = 0) -> list[Any]:
        """n inputs, the same ones for the same seed.

        Raises ValueError if n is not positive or if there are fewer real ones.
        """
        ...

    def run(self, model: nn.Module, given: Any) -> Tensor:
        """The model's result for one input, without gradients. A picture or what it is made of."""
        ...

    def compare(self, dense: Tensor, sparse: Tensor) -> dict[str, float]:
        """How two results for one input differ. The first key is `metric`."""
        ...

    def picture(self, given: Any, result: Tensor) -> Picture | None:
        """The result as uint8 [H, W, 3], or None where there is nothing to see."""
        ...

    def caption(self, given: Any) -> str:
        """A short name of the input, for tables and below pictures."""
        ...


@dataclass(frozen=True)
class ZooModule:
    """A model in eval mode that attends through `F.scaled_dot_product_attention` only.

    grids: from the number of tokens of an attention layer to its grid, or None where the tokens
    have none. It is given to `sparge.accelerate(model, grid=...)`.
    """

    name: str
    model: nn.Module
    grids: Callable[[int], Grid | None]
    task: Task


def need_positive(n: int) -> None:
    """Raise ValueError if `inputs` was asked for less than one."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")


def relative_l2(dense: Tensor, sparse: Tensor) -> float:
    """‖sparse - dense‖ / ‖dense‖ in float64; 0 if both are zero."""
    reference = dense.double()
    error, size = (sparse.double() - reference).norm().item(), reference.norm().item()
    if size == 0:
        return 0.0 if error == 0 else float("inf")
    return error / size
