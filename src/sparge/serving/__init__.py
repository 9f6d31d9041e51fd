"""Engines that serve many requests."""
