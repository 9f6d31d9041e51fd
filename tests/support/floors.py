"""The folders of the library, from the lowest to the highest."""

# Every folder and root module is a floor, and imports from floors before it in this list only.
FLOORS = [
    "support",
    "reorder",
    "values",
    "rules",
    "backends",
    "routing",
    "engine",
    "interop",
    "api",
    "parallel",
    "models",
    "__init__",
    "synthetic",
    "serving",
    "compat",
    "cli",
    "__main__",
]
