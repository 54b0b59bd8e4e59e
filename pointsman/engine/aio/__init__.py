"""Runs an engine in a thread of its own and passes requests and outputs between it and asyncio.

`engine_thread.py` owns the engine and handles messages between steps; `output_router.py` delivers outputs to mailboxes
(`mailbox.py`). The server uses these three modules, and reads the mailboxes itself. `async_engine.py` is the public
class for Python programs, where each request is a stream of outputs; `input_feed.py` is for prompts that arrive in
parts. The package imports the engine and its packages; only `pointsman.server` and callers import it.
"""
