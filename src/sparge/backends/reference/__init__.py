"""The stages in plain PyTorch: the definition that every other backend is tested against."""
