"""The version, where the build and every cache key find it."""

__version__ = "0.1.0"
