"""A method of one object, replaced on the instance, and put back."""

from __future__ import annotations

from typing import Any


class Replacement:
    """Stands in the place of a method of one object, from `install()` to `restore()`.

    `__call__` of a subclass runs instead; once restored, it must run the method alone, for those
    who still hold it. Copies of the object take it along.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.before = vars(owner).get(name)
        self.active = True

    def method(self) -> Any:
        """What the object had before."""
        return self.before or getattr(type(self.owner), self.name).__get__(self.owner)

    @property
    def __wrapped__(self) -> Any:
        """The method, for those who read its signature or its code."""
        return self.method()

    def install(self) -> None:
        vars(self.owner)[self.name] = self

    def restore(self) -> None:
        if vars(self.owner).get(self.name) is self:  # otherwise somebody has replaced it since
            if self.before is None:
                del vars(self.owner)[self.name]
            else:
                vars(self.owner)[self.name] = self.before
        self.active = False
