"""Executable specifications of the schedulers that the presets are named after, in simple loops."""
