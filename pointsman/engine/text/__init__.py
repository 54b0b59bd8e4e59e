"""Converts text to token ids and back.

`tokenizer.py` has tokenizers and chat templates. `detokenizer.py` makes text from tokens one at a time, with a stream
per kind of decoding in `token_streams.py`. The package imports `engine/errors.py`, `gguf/` and no other package of the
engine, and loads no PyTorch. Begin with `detokenizer.py`.
"""
