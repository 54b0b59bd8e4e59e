"""Packages that run Pointsman in other projects: `vllm`, inside the engine vLLM, and `ray`, on a Ray cluster.

`vllm` translates between vLLM's interfaces and the core. It imports `pointsman.core` and, lazily, vLLM; core, engine
and server never import `vllm`. `ray` is an entry point: it runs the server, and no other package imports it. Begin at
`vllm/__init__.py`, or `ray/__init__.py`.
"""
