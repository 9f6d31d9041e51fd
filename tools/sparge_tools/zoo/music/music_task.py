"""What the music encoder is measured by: hidden notes of a real piece, filled in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..vision.task import need_positive
from .midi_file import MASK

HIDDEN_SHARE = 0.15
"""Of the tokens, as in the encoder's training."""


@dataclass(frozen=True)
class Window:
    """Tokens of a part of the piece that begins at `start`; `hidden` marks the ones to fill in."""

    start: int
    tokens: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class MaskedNotes:
    """Fill in hidden tokens of a piece; compare by how many are filled in alike."""

    piece: tuple[int, ...]
    length: int = 3072

    def __post_init__(self) -> None:
        if not 2 <= self.length <= len(self.piece):
            needed = f"2 to {len(self.piece)}, the tokens of the piece"
            raise ValueError(f"length must be {needed}; got {self.length}")

    @property
    def about(self) -> str:
        return f"hidden tokens of {self.length}, filled in; share that is filled in as by dense"

    @property
    def metric(self) -> str:
        return "agreement"

    def inputs(self, n: int, seed: int = 0) -> list[Window]:
        """n parts of the piece at random places, of the seeds `seed`, `seed` + 1, and so on."""
        need_positive(n)
        return [self._window(seed + i) for i in range(n)]

    def _window(self, seed: int) -> Window:
        generator = torch.Generator().manual_seed(seed)
        places = len(self.piece) - self.length + 1
        start = int(torch.randint(places, (), generator=generator))
        hidden = torch.rand(self.length, generator=generator) < HIDDEN_SHARE
        hidden[int(torch.randint(self.length, (), generator=generator))] = True
        return Window(start, torch.tensor(self.piece[start : start + self.length]), hidden)

    @torch.no_grad()
    def run(self, model: nn.Module, given: Window) -> Tensor:
        """Two rows: the tokens that are filled in, and the true ones."""
        device = next(model.parameters()).device
        shown = given.tokens.masked_fill(given.hidden, MASK)
        filled = model(shown[None].to(device))[0].argmax(-1).cpu()
        return torch.stack([filled[given.hidden], given.tokens[given.hidden]])

    def compare(self, dense: Tensor, sparse: Tensor) -> dict[str, float]:
        """agreement: equal tokens of both. accuracy: right tokens of each."""
        alike = (dense[0] == sparse[0]).double().mean().item()
        right = [(filled == true).double().mean().item() for filled, true in (dense, sparse)]
        return {"agreement": alike, "accuracy_dense": right[0], "accuracy_sparse": right[1]}

    def picture(self, given: Window, result: Tensor) -> None:
        """None: there is nothing to see."""

    def caption(self, given: Window) -> str:
        return f"tokens {given.start} to {given.start + self.length - 1}"
