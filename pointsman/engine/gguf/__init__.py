"""Reads GGUF files, the format of llama.cpp: a model in one file, or in parts.

`reader.py` reads the metadata and locates the tensors. `config.py` makes a configuration and generation settings from
the metadata, `tensors.py` the weights, and `tokenizer.py` the tokenizer. `export.py` writes all these parts as a
directory in the Hugging Face format. The `gguf` library, from the authors of llama.cpp, has the types and names of
tensors and dequantises blocks. The package imports the engine's errors. Begin with `reader.py`. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from pathlib import Path

PART_NAME = re.compile(r"(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.IGNORECASE | re.DOTALL)
"""Pattern of the name of a file that is one of several parts of a model."""


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, existing or not: the path ends with .gguf, and is no directory."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()
