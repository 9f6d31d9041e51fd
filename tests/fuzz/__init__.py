"""Random calls of the native core against the reference, while time lasts: `make fuzz`."""
