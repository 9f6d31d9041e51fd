"""Tools of sparge: tuning, benchmarks, static checks, evaluation, renders, the demo and the zoo."""

__version__ = "0.1.0"
