"""llama.cpp's side of `engine_throughput.py`, to be run in the environment that `llama_cpp_env.py` makes.

llama.cpp computes batches of tokens of several sequences, and its caller chooses the tokens of a batch. Here the caller
is the loop of its server, without HTTP and without a sampler: each batch has one token of every running request and,
up to the batch size, the prompts of waiting ones. The next tokens are the largest logits, found by NumPy.

Settings that are not named keep llama.cpp's defaults: flash attention where it can, a cache of 16-bit floats, batches
computed in parts of 512 tokens. Every sequence has a cache of its own, as in `llama-batched-bench`.

`options["type"]` is a type of GGUF that the weights are converted to, once, beside the other models of the benchmarks.
With some types, such as Q4_1, a batch of several tokens takes nearly as long as the tokens one by one; with Q8_0 less.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from _engine_model import CACHE
from _engine_worker import Answer, Session, Settings, serve


@dataclass
class Request:
    """A request in its sequence of the context."""

    sequence: int
    prompt: list[int]
    num_outputs: int
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)
    first_token: float | None = None

    def next_tokens(self, room: int) -> list[int]:
        """Tokens of the request in the next batch: the rest of its prompt, or its last token."""
        rest = self.prompt[self.num_computed :] or self.tokens[-1:]
        return rest[:room]


class LlamaCppSession(Session):
    """A model and a context with a sequence for each request."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        llama_cpp.llama_backend_init()
        file = Path(settings.model)
        if (kind := settings.options.get("type")) is not None:
            file = converted(file, kind, settings.threads)
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings.max_num_seqs * settings.max_model_len
        params.n_seq_max = settings.max_num_seqs
        params.n_batch = settings.max_num_batched_tokens
        params.n_threads = params.n_threads_batch = settings.threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot create a context of {params.n_ctx} tokens")
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def about(self) -> dict[str, Any]:
        description = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.model, description, len(description))
        return {
            "bindings": llama_cpp.__version__,
            "model": description.value.decode(),
            "threads": llama_cpp.llama_n_threads(self.context),
            "ubatch": llama_cpp.llama_n_ubatch(self.context),
            "system": llama_cpp.llama_print_system_info().decode().strip(" |"),
        }

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[Answer]:
        if len(prompts) > self.settings.max_num_seqs:
            raise RuntimeError(
                f"{len(prompts)} prompts were given; the context accepts {self.settings.max_num_seqs} at the same time"
            )
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        requests = [Request(i, prompt, length) for i, (prompt, length) in enumerate(zip(prompts, outputs, strict=True))]
        start = perf_counter()
        while unfinished := [request for request in requests if len(request.tokens) < request.num_outputs]:
            # Requests that decode come first; `sorted` keeps the order of arrival.
            self._step(sorted(unfinished, key=lambda request: not request.tokens), start)
        return [Answer(request.tokens, request.first_token) for request in requests]

    def _step(self, requests: Sequence[Request], start: float) -> None:
        """Compute one batch, and give each request whose prompt is computed its next token."""
        batch, count = self.batch, 0
        ready: list[Request] = []
        for request in requests:
            tokens = request.next_tokens(self.settings.max_num_batched_tokens - count)
            for token in tokens:
                batch.token[count] = token
                batch.pos[count] = request.num_computed
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = request.sequence
                batch.logits[count] = False
                request.num_computed += 1
                count += 1
            if tokens and request.num_computed >= len(request.prompt):
                batch.logits[count - 1] = True
                ready.append(request)
        batch.n_tokens = count
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (len(ready), self.vocab_size))
        now = perf_counter() - start
        for request, token in zip(ready, logits.argmax(axis=1).tolist(), strict=True):
            if request.first_token is None:
                request.first_token = now
            request.tokens.append(token)


def converted(file: Path, kind: str, threads: int, cache: Path = CACHE) -> Path:
    """The GGUF file with the weights of `file` in the type `kind`; it is written first if it is missing."""
    target = cache / f"{file.stem}-{kind}-{file.stat().st_mtime_ns:x}.gguf"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        params.allow_requantize = True
        params.nthread = threads
        part = target.with_suffix(".part")
        if code := llama_cpp.llama_model_quantize(str(file).encode(), str(part).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot convert {file} to {kind}: {code}")
        part.replace(target)
    return target


if __name__ == "__main__":
    serve(LlamaCppSession)
