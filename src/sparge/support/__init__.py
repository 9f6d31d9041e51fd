"""Small tools without a domain of their own: files, sums, autocast, the processor."""
