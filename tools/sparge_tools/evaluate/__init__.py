"""`sparge eval`: what a language model gains with sparge, and what it costs.

Settings are split into cells. Each cell is one measurement, saved as soon as it is made; the
document is computed from the cells. lm-eval runs the measures it has tasks for; prefill time,
perplexity by position, divergence and per-head error are measured here.
"""
