"""The version of pdlab, which the package's metadata takes from here."""

__version__ = "0.1.0"
