"""Real weights and real prompts for `engine_throughput.py --model`, in the form that each engine reads.

Prompts are paragraphs of Python's documentation (`pydoc_data.topics`, which Python brings), each with a question
before it, in the model's chat format where it has one. A pair of question and paragraph occurs once, so a prefix cache
holds no more than the system prompt and the question.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice, product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from _common import note
from _engine_contest import Contender, Requests, Workload
from _engine_model import CACHE

from pointsman.engine.gguf import is_gguf
from pointsman.engine.gguf.export import export_directory
from pointsman.engine.sources.find import find_model
from pointsman.engine.text.tokenizer import encode, read_tokenizer, render_chat

MIN_PROMPT, MAX_PROMPT = 30, 200
WARM_UP_REQUESTS, WARM_UP_OUTPUT = 16, 16
QUESTIONS = (
    "Explain this to a beginner:",
    "Summarise this in one sentence:",
    "What follows from this for someone who writes a program?",
    "Give an example for this:",
    "Which question does this text answer?",
    "Rewrite this in plain English:",
    "Name the most important term in this text, and say what it means:",
    "What could go wrong here?",
)


class RealModel(Workload):
    """A model, and requests with outputs of one length.

    Args:
        model: the value of `pointsman serve --model`.
        loads: numbers of requests at once.
        output: tokens of each output.

    Raises:
        ModelLoadError: there is no such model.
        SystemExit: it has no tokenizer, or there are too few prompts.
    """

    def __init__(self, model: str, loads: Sequence[int], output: int) -> None:
        self.path = find_model(model)
        self.loads = loads
        self.max_tokens = MAX_PROMPT + output
        self._output = output
        self._directories: dict[str, Path] = {}
        self._tokenizer = read_tokenizer(self.path)
        if self._tokenizer is None:
            raise SystemExit(f"--model {self.path} has no tokenizer, so it accepts no text; give another model")
        self._draw = self._all_prompts()
        self._drawn: list[list[int]] = []

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.path)

    def model_of(self, contender: Contender) -> Path:
        """The GGUF file, or a directory with its weights in the contender's dtype."""
        if contender.reads_gguf or not self.is_gguf:
            return self.path
        if contender.dtype not in self._directories:
            self._directories[contender.dtype] = exported(self.path, contender.dtype)
        return self._directories[contender.dtype]

    def requests(self, load: int, round_number: int) -> Requests:
        before = WARM_UP_REQUESTS + round_number * sum(self.loads) + sum(self.loads[: self.loads.index(load)])
        return self._requests(before, load, self._output)

    def warm_up(self) -> Requests:
        return self._requests(0, WARM_UP_REQUESTS, min(self._output, WARM_UP_OUTPUT))

    def _requests(self, first: int, count: int, output: int) -> Requests:
        self._drawn += islice(self._draw, max(0, first + count - len(self._drawn)))
        if len(self._drawn) < first + count:
            raise SystemExit(f"the texts give only {len(self._drawn)} different prompts; lower --rounds or --requests")
        return Requests(self._drawn[first : first + count], [output] * count)

    def _all_prompts(self) -> Iterator[list[int]]:
        """The prompts of the right lengths, in a fixed order."""
        texts = [f"{question}\n\n{text}" for question, text in product(QUESTIONS, paragraphs())]
        for at in np.random.default_rng(0).permutation(len(texts)):
            prompt = to_prompt_tokens(self._tokenizer, texts[at])
            if MIN_PROMPT <= len(prompt) <= MAX_PROMPT:
                yield prompt


def paragraphs() -> list[str]:
    """The paragraphs of Python's documentation that are prose, each as one line."""
    texts = (text for topic in topics.values() for text in topic.split("\n\n"))
    prose = (text for text in texts if text[:1].isalpha() and "\n " not in text and text.endswith("."))
    return list(dict.fromkeys(text.replace("\n", " ") for text in prose))


def to_prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """A prompt as a server makes it from one message; without a chat format, the text itself."""
    if not tokenizer.chat_template:
        return encode(tokenizer, text)
    chat = render_chat(tokenizer, [{"role": "user", "content": text}], {"add_generation_prompt": True})
    return encode(tokenizer, chat, add_special_tokens=False)


def exported(file: Path, dtype: str, cache: Path = CACHE) -> Path:
    """The directory in the Hugging Face format with the weights of a GGUF file, written first if it is not there."""
    status = file.stat()
    key = blake2b(repr((str(file.resolve()), status.st_size, status.st_mtime_ns)).encode(), digest_size=4).hexdigest()
    directory = cache / f"{file.stem}-{dtype}-{key}"
    if not directory.is_dir():
        note(f"  writing {directory}, for the engines that read no GGUF files")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="writing-") as temporary:
            export_directory(file, made := Path(temporary) / "model", dtype)
            os.replace(made, directory)
    return directory
