"""An engine for asyncio: it runs in a thread of its own, and each request is a stream of outputs.

`async_engine.py` is the public class; `engine_thread.py` owns the engine and handles messages between steps; outputs
come back through `readers.py` and mailboxes (`mailbox.py`); `input_feed.py` is for prompts that arrive in parts.
It imports the engine and its packages; only `pointsman.server` and callers import it.
Begin with `async_engine.py`.
"""
