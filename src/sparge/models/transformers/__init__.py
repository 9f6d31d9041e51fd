"""transformers: importing this registers the name, for `attn_implementation="sparge"`.

`sparge.accelerate(model)` is the same for one model, reversible, with a report.
"""

from .adapter import NAME, attention_forward, register

__all__ = ["NAME", "attention_forward", "register"]

register()
