"""Checks a call, runs its stages, registers the ops."""
