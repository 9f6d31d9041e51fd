"""The native core for the processor (csrc/)."""
