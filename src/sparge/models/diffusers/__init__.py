"""diffusers: importing this registers the backend name, for `set_attention_backend("sparge")`.

`sparge.accelerate(pipe)` does more: it knows layers, text tokens, the grid and the noise level, and
can be undone.
"""

from .backend import NAME, register

__all__ = ["NAME", "register"]

register()
