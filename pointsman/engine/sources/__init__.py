"""Where a model comes from: a directory, a GGUF file, a named model, or a repository of a hub.

`find.py` decides which of these a name means and returns a path; everything else in the engine takes that path.
`hub.py` downloads repositories, `named.py` installs small models with a name.
"""
