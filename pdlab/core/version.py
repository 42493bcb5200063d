"""The version of pdlab, which the package's metadata takes from here."""

__version__ = "0.1.0"

# What every node of a cluster needs, in these versions and no others: the pins of pyproject.toml.
STACK = {"ray": "2.60.0", "vllm": "0.29.0", "nixl": "1.3.2"}


def stack_text() -> str:
    """The packages with their versions, as a list in one line."""
    return ", ".join(f"{package} {version}" for package, version in STACK.items())
