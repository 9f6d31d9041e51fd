"""Which backend serves a call, and why none of the others."""
