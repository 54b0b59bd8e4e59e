"""Pointsman in other projects, one package each: inside the engine `vllm`, and on a cluster of `ray`.

`vllm` translates between its host's interfaces and the core. It imports `pointsman.core` and, lazily, its host; core,
engine and server never import it. `ray` is an entry point: it runs the server, and nothing imports it. Begin at
`vllm/__init__.py`, or `ray/__init__.py`.
"""
