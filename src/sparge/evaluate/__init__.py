"""What a language model gains and what it costs: the measures of `sparge eval`.

Settings are cut into cells, each one measurement that is kept as soon as it is made; a document
is summed up from the cells. lm-eval runs what it has a task for; prefill times, position buckets,
divergence and per-head error, which it has not, are measured here.
"""
