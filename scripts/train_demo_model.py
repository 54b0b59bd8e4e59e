"""Trains the small demonstration model that ships with the package.

Purpose
    A first run should stream real text without a download.  The model has a few
    megabytes, knows nothing, and writes text that looks like Python documentation.
    It shows streaming, prefix caching, speculative decoding and end-of-text at work.
    It is no measure of quality.

Training text
    Text of every Python installation: the help topics in ``pydoc_data.topics``, the
    docstrings of the standard library and those of the modules compiled into the
    interpreter.  A source file with its own permission notice is left out whole, so
    all text is under the licence of Python itself, and no licence text is learned.

Method
    1. The text becomes *documents*: one section of a topic, one module, one class
       with its methods, one function.  Repeated paragraphs are dropped, because the
       topics quote each other at length.
    2. A byte-level BPE tokenizer is trained on the documents.
    3. Each epoch shuffles the documents and joins them with the end-of-text token,
       so the model learns when to stop.  Windows are cut from that stream.  Each
       window starts at a paragraph, because a prompt has no text before it.
    4. Muon trains the matrices and AdamW the rest, with a warm-up and a decay.  The
       schedule counts steps; the time limit can only shorten it.  A run within its
       limit depends only on the seed, the Python version and the machine's
       arithmetic.

Run it from the repository root::

    python scripts/train_demo_model.py --out pointsman/engine/demo

It needs ``torch`` (2.9 or later, for the Muon optimizer), ``transformers`` and
``tokenizers``, and some twenty minutes of one core.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import inspect
import itertools
import math
import platform
import random
import re
import sys
import sysconfig
import textwrap
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048
POSITIONS = 16384
VALIDATION_SHARE = 25  # one document in this many is held out

# --------------------------------------------------------------------------------------
# Corpus
# --------------------------------------------------------------------------------------

# A file with one of these texts has its own terms, beside those of Python.
NOTICE = re.compile(
    r"Permission (?:to use|to copy|is hereby)|Redistribution and use|SPDX-License"
    r"|WARRANT(?:Y|IES)|'as[- ]is'|(?:MIT|BSD|Apache|ISC|zlib)(?:-style)? licen[sc]e"
    r"|(?:re)?distributed under",
    re.IGNORECASE,
)
# Documents about licence terms, which the model should not learn.
LEGAL = re.compile(r"\bGNU\b|licen[sc]e|copyright|warrant(?:y|ies)|all rights reserved", re.I)
# Third-party code, tests, tables, and generated or platform-specific files.
SKIPPED_PART = re.compile(
    r"(?:site-packages|dist-packages|ensurepip|_vendor|tests?|idle_test|encodings|pydoc_data"
    r"|turtledemo|lib-dynload|__phello__|config-.*|_sysconfigdata.*|_aix.*|_osx.*|antigravity\.py)"
)
# Modules that are compiled into the interpreter, so their text is in no Python file.
COMPILED_MODULES = (
    "builtins", "sys", "itertools", "math", "time", "_collections", "_functools",
    "_io", "_operator", "_thread", "_weakref", "_codecs", "_abc", "gc", "posix",
)  # fmt: skip
SHORTEST_DOCUMENT = 40
# Grammar rules, which are no prose, and mail addresses, which are private.
UNWANTED = re.compile(r"::=|[\w.+-]+@[\w-]+\.\w")
SHORTEST_REPEAT = 60  # a shorter paragraph may occur more than once


def topic_documents() -> Iterator[str]:
    """The sections of the interactive help's topics."""
    from pydoc_data.topics import topics

    # A heading is a line above a line of underlining; a section starts there.
    heading = re.compile(r"^(?=\S.*\n([*=\-~^\"])\1{3,}\n)", re.MULTILINE)
    for name in sorted(topics):
        starts = [found.start() for found in heading.finditer(topics[name])]
        edges = [0, *starts, len(topics[name])]
        for start, end in itertools.pairwise(edges):
            section = re.sub(r"\n([*=\-~^\"])\1{3,}\n", "\n", topics[name][start:end])
            yield re.sub(r"(?m)^Related help topics:.*$", "", section)


def docstrings(node: ast.AST) -> Iterator[str]:
    """One document for a class with its methods, one for a module, one for a function."""
    if isinstance(node, ast.Module):
        yield ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            methods = [m for m in ast.iter_child_nodes(child) if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef))]
            parts = [ast.get_docstring(owner) or "" for owner in (child, *methods)]
            yield "\n\n".join(part for part in parts if part)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(child) or ""


def library_documents() -> Iterator[str]:
    """The docstrings of the standard library's own Python files, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if any(SKIPPED_PART.fullmatch(part) for part in path.relative_to(root).parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if NOTICE.search(source):
            continue
        try:
            yield from docstrings(ast.parse(source))
        except SyntaxError:  # templates and code for an older Python
            continue


def compiled_documents() -> Iterator[str]:
    """The docstrings of objects that exist only as compiled code."""
    for module_name in COMPILED_MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # posix is absent on Windows
            continue
        for _, item in sorted(vars(module).items()):
            if inspect.isclass(item):
                members = [item, *(member for _, member in sorted(vars(item).items()))]
                parts = [getattr(member, "__doc__", None) for member in members]
                texts = [inspect.cleandoc(part) for part in parts if isinstance(part, str)]
                yield "\n\n".join(texts)
            elif callable(item):
                yield inspect.cleandoc(getattr(item, "__doc__", None) or "")


def paragraphs(document: str) -> list[str]:
    """Split at blank lines; join the lines of plain prose, and keep all other layout."""
    result = []
    for block in re.split(r"\n[ \t]*(?:\n[ \t]*)*\n", document.expandtabs().strip("\n")):
        lines = textwrap.dedent(block).rstrip().split("\n")
        prose = len(lines) > 1 and all(re.match(r"[\w\"'(`*]", line) for line in lines)
        if prose and min(map(len, lines[:-1])) > 40:
            lines = [" ".join(lines)]
        text = "\n".join(line.rstrip() for line in lines)
        if text and not UNWANTED.search(text):
            result.append(text)
    return result


def corpus() -> list[str]:
    """All documents, in an order that depends only on the Python installation."""
    seen: set[str] = set()
    documents = []
    for source in (topic_documents(), library_documents(), compiled_documents()):
        for raw in source:
            if LEGAL.search(raw):
                continue
            fresh = [p for p in paragraphs(raw) if len(p) < SHORTEST_REPEAT or p not in seen]
            seen.update(fresh)
            document = "\n\n".join(fresh)
            if len(document) >= SHORTEST_DOCUMENT and document not in seen:
                seen.add(document)
                documents.append(document)
    return documents


def split(documents: Iterable[str]) -> tuple[list[str], list[str]]:
    """Training and held-out documents, divided by their checksums."""
    sides: tuple[list[str], list[str]] = ([], [])
    for document in documents:
        sides[zlib.crc32(document.encode()) % VALIDATION_SHARE == 0].append(document)
    return sides


# --------------------------------------------------------------------------------------
# Tokenizer and token streams
# --------------------------------------------------------------------------------------

# Pieces are words, numbers, signs and blank space.  A run of line ends is one piece, so
# a paragraph has the same tokens with or without a following one.
PIECES = (
    r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
    r"|[ \t]*[\r\n]+|\s+(?!\S)|\s+"
)
# The model completes text and knows no roles, so the template only joins the messages.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE.  Any text round-trips, because every byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


class Text:
    """Documents that become one stream of tokens, shuffled and cut again for every epoch."""

    def __init__(self, documents: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
        self.documents = documents
        self.backend = tokenizer.backend_tokenizer
        self.end = tokenizer.eos_token_id
        vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        pieces = [tokenizer.convert_tokens_to_string([token]) for token in vocabulary]
        # Token ids after which a paragraph starts.
        self.breaks = np.array([i for i, p in enumerate(pieces) if "\n\n" in p or i == self.end])

    def stream(self, documents: list[str]) -> np.ndarray:
        """The documents' tokens, each document closed by the end-of-text token."""
        parts = [[*e.ids, self.end] for e in self.backend.encode_batch_fast(documents)]
        return np.concatenate([np.array(part, dtype=np.int64) for part in parts])

    def size(self) -> str:
        """The amount of text, in words for the model card."""
        characters, tokens = sum(map(len, self.documents)), len(self.stream(self.documents))
        return f"{len(self.documents):,} documents, {characters:,} characters, {tokens:,} tokens"

    def epoch(self, generator: random.Random) -> np.ndarray:
        """A shuffled stream; half of the documents lose the quotes around names.

        The topics write ``The "import" statement``.  Users type it without the quotes,
        so the model should learn both spellings.
        """
        documents = [
            re.sub(r'"([\w.]+)"', r"\1", document) if generator.random() < 0.5 else document
            for document in self.documents
        ]
        generator.shuffle(documents)
        return self.stream(documents)

    def windows(self, stream: np.ndarray, length: int) -> list[np.ndarray]:
        """Windows of ``length + 1`` tokens that cover the stream, each from a paragraph.

        The next window starts at the last paragraph start inside the present window.  The
        few tokens from there on are used twice, which costs less than a start inside a
        sentence.
        """
        starts = np.flatnonzero(np.isin(stream, self.breaks)) + 1
        result, at = [], 0
        while at + length < len(stream):
            result.append(stream[at : at + length + 1])
            inside = starts[(starts > at + length // 2) & (starts <= at + length)]
            at = int(inside[-1]) if len(inside) else at + length
        return result


# --------------------------------------------------------------------------------------
# Model and training
# --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parameters of a run, apart from the corpus."""

    seed: int = 20
    steps: int = 1000
    minutes: float = 20.0
    threads: int = 2
    tokens_per_step: int = 4096
    warmup: float = 0.03
    matrix_rate: float = 4e-3
    other_rate: float = 1.2e-2
    weight_decay: float = 0.1
    # Short windows first: they are cheaper, and most patterns are local.  Long windows at
    # the end, so that the model has seen long texts.
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.55, 512), (0.85, 1024))

    def rate(self, progress: float) -> float:
        """The share of the peak learning rate: a linear rise, then half a cosine."""
        if progress < self.warmup:
            return progress / self.warmup
        done = (progress - self.warmup) / (1 - self.warmup)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))

    def length(self, progress: float) -> int:
        """The window length at this point of the run."""
        return [length for start, length in self.lengths if progress >= start][-1]


def build_model(end_of_text: int) -> Qwen3ForCausalLM:
    """A plain Qwen3 decoder of 2.8 million parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=end_of_text, pad_token_id=end_of_text, do_sample=True, temperature=0.7
    )
    return model


def optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks; AdamW for the embedding and the norms."""
    blocks = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    matrices = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if id(p) not in matrices]
    return [
        torch.optim.Muon(
            blocks,
            lr=recipe.matrix_rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def token_losses(model: Qwen3ForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood, in nats, of every token after a window's first."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits.float()
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    return flat.view(len(windows), -1)


class Clock:
    """The progress of the run: by steps, or by time if the time limit comes first."""

    def __init__(self, recipe: Recipe) -> None:
        self.steps, self.limit = recipe.steps, 60 * recipe.minutes
        self.step = 0
        self.began = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def progress(self) -> float:
        return max(self.step / self.steps, self.seconds() / self.limit)


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a training run."""

    steps: int
    cpu_seconds: float


def batches(text: Text, recipe: Recipe, clock: Clock) -> Iterator[torch.Tensor]:
    """Endless training batches.  Each epoch uses the window length for its progress."""
    generator = random.Random(recipe.seed)
    while True:
        length = recipe.length(clock.progress())
        windows = text.windows(text.epoch(generator), length)
        generator.shuffle(windows)
        size = recipe.tokens_per_step // length
        for at in range(0, len(windows) - size + 1, size):
            yield torch.from_numpy(np.stack(windows[at : at + size]))


def train(model: Qwen3ForCausalLM, text: Text, held_out: Text, recipe: Recipe) -> Run:
    """Train in place."""
    began = time.process_time()
    clock = Clock(recipe)
    steppers = optimizers(model, recipe)
    groups = [group for stepper in steppers for group in stepper.param_groups]
    peaks = [group["lr"] for group in groups]
    supply = batches(text, recipe, clock)
    model.train()
    while clock.progress() < 1:
        share = recipe.rate(clock.progress())
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * share
        # Matrix products in bfloat16 take half the time; the weights stay in float32.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = token_losses(model, next(supply)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        clock.step += 1
        if clock.step % 100 == 0:
            nats = evaluate(model, held_out).nats
            print(
                f"step {clock.step:5d} {clock.seconds():6.0f} s  loss {loss.item():.3f}, held out {nats:.3f}",
                flush=True,
            )
    return Run(clock.step, time.process_time() - began)


@dataclass(frozen=True, slots=True)
class Score:
    """A model's loss on a text: in nats per token and in bits per character."""

    nats: float
    bits_per_character: float


@torch.inference_mode()
def evaluate(model: Qwen3ForCausalLM, text: Text, length: int = 512) -> Score:
    """Score every token of the documents once, in their stored order."""
    model.eval()
    stream = torch.from_numpy(text.stream(text.documents))
    # Neighbouring windows share one token, so each token after the first is predicted once.
    whole = (len(stream) - 1) // length
    body = stream[: whole * length + 1].unfold(0, length + 1, length)
    losses = [token_losses(model, rows).flatten() for rows in body.split(8)]
    if len(stream) - 1 > whole * length:
        losses.append(token_losses(model, stream[None, whole * length :]).flatten())
    nats = torch.cat(losses)
    model.train()
    characters = sum(map(len, text.documents))
    return Score(nats.mean().item(), nats.sum().item() / math.log(2) / characters)


# --------------------------------------------------------------------------------------
# What is written
# --------------------------------------------------------------------------------------

PROMPTS = ("The import statement", "A list is", "To open a file", "Return True if", "Raised when an operation")

CARD = """\
---
language: en
library_name: transformers
pipeline_tag: text-generation
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
---

# The demo model

A language model of {parameters:,} parameters that ships with the package, so that a first run streams text without a
download. It was trained from scratch, on a CPU, by one script.

## What it is for, and what not

It is there to watch an engine work: streaming, prefix caching, preemption, speculative decoding, end-of-text. It
continues text in the manner of Python's documentation. It knows nothing: what it says about Python, or about anything,
is a likely run of words and mostly false. It follows no instructions, and its chat template only joins the messages.
Take nothing it writes for a fact, and nothing it does for a measure of quality. Sample at a temperature near 0.7: at 0
it falls into loops.

## Numbers

| | |
| --- | --- |
| architecture | Qwen3: {config.num_hidden_layers} layers, width {config.hidden_size}, heads of {config.head_dim} |
| heads | {config.num_attention_heads} for queries, {config.num_key_value_heads} for keys and values |
| vocabulary | {config.vocab_size} tokens, byte-level BPE; token {config.eos_token_id} ends a text |
| weights | bfloat16, {megabytes:.1f} MB |
| held-out loss | {score.nats:.2f} nats per token (uniform: {uniform:.2f}) |
| held-out bits per character | {score.bits_per_character:.2f} |
| training text | {train} |
| held-out text | {held_out} |
| training | {run.steps:,} steps of {recipe.tokens_per_step:,} tokens, which is {epochs:.1f} times the training text |
| training time | {run.cpu_seconds:.0f} s of processor time on {recipe.threads} threads |

The loss is that of the stored weights with windows of 512 tokens. Held-out documents come from the same sources as the
others; no paragraph of {repeat} characters or more occurs in both, but the subjects do.

Positions up to {config.max_position_embeddings:,} are legal, so that long prompts can be tried, but training windows
had at most {longest:,} tokens. Held-out loss by window length: {by_length}.

## Where the text comes from

Only from what a Python installation carries: the help topics (`pydoc_data.topics`), the docstrings of the standard
library, and those of modules compiled into the interpreter, all of Python {python}. Left out: third-party code, tests,
any source file with a permission notice of its own, and any text about licences. That text is

> {copyright}

under the Python Software Foundation License Version 2, whose text is in `LICENSE-PSF.txt`. The summary of changes that
it asks for: the text was cut into documents, lines of prose were joined; grammar rules, mail addresses and repeated
paragraphs were dropped; a model was fitted to the rest. It repeats some phrases of that text word for word.

## How to make it again

    python scripts/train_demo_model.py --threads {recipe.threads} --minutes {recipe.minutes:.0f} \\
        --out pointsman/engine/demo

The text, and with it the model, depends on the Python version; another number of threads
rounds differently. This one: Python {python}, torch {torch},
transformers {transformers}, seed {recipe.seed}, SHA-256 of the corpus {digest}.

## Samples at temperature 0.7

{samples}
"""


@torch.inference_mode()
def sample(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int = 60) -> str:
    """The prompt and a continuation, drawn at temperature 0.7."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=True, temperature=0.7)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def python_licence() -> str | None:
    """The section of Python's licence file that covers the training text; some systems ship no such file."""
    for folder in (Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["data"])):
        for name in ("LICENSE.txt", "LICENSE"):
            if (folder / name).is_file():
                text = (folder / name).read_text(encoding="utf-8")
                start = text.index("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\n---")
                return text[start : text.index("BEOPEN.COM LICENSE AGREEMENT", start)].rstrip() + "\n"
    return None


def card(path: Path, texts: tuple[Text, Text], recipe: Recipe, run: Run, digest: str) -> str:
    """The model card, from measurements of the model as it is stored."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    train_text, held_out = texts
    score = evaluate(model, held_out)
    lengths = [(length, evaluate(model, held_out, length).nats) for length in (256, 1024, 4096, POSITIONS)]
    torch.manual_seed(recipe.seed)
    samples = [sample(model, tokenizer, prompt) for prompt in PROMPTS]
    return CARD.format(
        config=model.config, recipe=recipe, run=run, score=score, digest=digest, repeat=SHORTEST_REPEAT,
        parameters=sum(p.numel() for p in model.parameters()),
        megabytes=(path / "model.safetensors").stat().st_size / 1e6,
        uniform=math.log(model.config.vocab_size),
        train=train_text.size(),
        held_out=held_out.size(),
        epochs=run.steps * recipe.tokens_per_step / len(train_text.stream(train_text.documents)),
        longest=recipe.lengths[-1][1],
        by_length=", ".join(f"{nats:.2f} at {length:,}" for length, nats in lengths),
        copyright=sys.copyright.splitlines()[0].rstrip(".") + "; All Rights Reserved",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        samples="\n\n---\n\n".join(textwrap.indent(text, "    ", lambda line: True).rstrip() for text in samples),
    )  # fmt: skip


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Weights in bfloat16, configuration and tokenizer, as transformers reads them."""
    path.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "model.safetensors").chmod(0o644)  # safetensors writes files that only the owner can read
    if licence := python_licence():
        (path / "LICENSE-PSF.txt").write_text(licence, encoding="utf-8")


def arguments() -> argparse.Namespace:
    defaults = Recipe()
    parser = argparse.ArgumentParser(description="Train the demonstration model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="limit of wall time (default 20)")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="steps, if time allows (default %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int, default=defaults.threads)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    recipe = Recipe(seed=options.seed, steps=options.steps, minutes=options.minutes, threads=options.threads)
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)

    documents = corpus()
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    train_documents, held_documents = split(documents)
    tokenizer = train_tokenizer(train_documents)
    train_text, held_out = Text(train_documents, tokenizer), Text(held_documents, tokenizer)
    print(f"{len(documents)} documents, {sum(map(len, documents))} characters, SHA-256 {digest[:12]}", flush=True)

    model = build_model(tokenizer.eos_token_id)
    run = train(model, train_text, held_out, recipe)
    save(model, tokenizer, options.out)
    text = card(options.out, (train_text, held_out), recipe, run, digest)
    (options.out / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
