"""The version of Pointsman, in a module without imports, so that every package may read it."""

__version__ = "0.1.0"
