"""Implementations of the stages: the plain-PyTorch reference, the native CPU core, dense SDPA."""
