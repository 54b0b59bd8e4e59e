"""From text to token ids and back.

Tokenizers and chat templates (`tokenizer.py`), and text from tokens as they come, one at a time (`detokenizer.py`, with
one stream per way of decoding in `token_streams.py`).
It imports the engine's errors and no other package of it; nothing here loads PyTorch.
Begin with `detokenizer.py`.
"""
