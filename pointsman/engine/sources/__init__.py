"""Finds the files of a model: a directory, a GGUF file, a named model, or a repository of a hub.

`find.py` resolves a name to a path, which all other parts of the engine use. `hub.py` downloads repositories, and
`named.py` installs small named models.
"""
