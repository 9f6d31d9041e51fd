"""One run as data → table, JSON. Nothing here prints; the console program does."""
