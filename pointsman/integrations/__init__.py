"""Pointsman inside engines of other projects, one package each: today `vllm`.

An integration translates between its host's interfaces and the core. It imports `pointsman.core` and, lazily, its host;
core, engine and server never import an integration. Begin at `vllm/__init__.py`.
"""
