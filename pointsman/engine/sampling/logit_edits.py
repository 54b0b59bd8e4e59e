"""Edits logits for requests with allowed tokens, bad words, `min_tokens`, biases, penalties or grammars.

The edits are collected per row on the host (`EditedRow.edit`), from the request's tokens, and applied to the logits of
all rows in one call (`LogitEdits.apply`), in vLLM's order:

1. The logits of some tokens become minus infinity: tokens that are not allowed, tokens that complete a bad word, and
   EOS and stop tokens before `min_tokens`.
2. Biases are added.
3. Penalties are applied.
4. The logits of tokens that a grammar does not allow become minus infinity.

If a grammar allows only the end of the text, the other edits of the row are skipped.

Edits do not depend on the engine's history: token counts are updated to the request's current tokens, and tokens are
counted again after a new admission (after a preemption, for example). So a request samples the same tokens alone,
batched, preempted, or in a repeated step.

With several steps in flight, the newest tokens of a request may be unknown when a step is prepared. The edits for
penalties and bad words are then completed just before the step is executed (`UnfinishedEdit`). Requests with a grammar
are scheduled only when all their tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pointsman.core.state.request import Request
from pointsman.engine.arrays import Float32Array, Int64Array
from pointsman.engine.errors import failure_detail
from pointsman.engine.grammar.matcher import RequestGrammar, TokenMasks
from pointsman.engine.params.sampling import SamplingParams

MINUS_INFINITY = float("-inf")

Finish: TypeAlias = "Callable[[LogitEdits, list[int]], None]"
"""Function that adds an edit to its first argument. The second argument lists the request's newest tokens, which were
unknown when the step was prepared."""


class TokenCounts:
    """Counts the occurrences of each token in a growing sequence, and lists the tokens that occur, in memory of
    O(vocabulary)."""

    __slots__ = ("_is_known", "_known", "_num_known", "counts")

    def __init__(self, vocab_size: int) -> None:
        self.counts = np.zeros(vocab_size, dtype=np.int32)
        """[vocab_size] number of occurrences of each token among the tokens that `add` has counted."""
        self._is_known = np.zeros(vocab_size, dtype=np.bool_)
        self._known = np.zeros(256, dtype=np.int64)  # the tokens for which `_is_known` is true; the array grows
        self._num_known = 0

    @property
    def known(self) -> Int64Array:
        """The distinct tokens that were arguments of `add` or `add_uncounted`."""
        return self._known[: self._num_known]

    def add_uncounted(self, token_ids: npt.NDArray[np.integer]) -> None:
        """Add tokens to `known` without counting them (used for the tokens of a prompt)."""
        token_ids = token_ids[token_ids < len(self.counts)]
        new = np.unique(token_ids[~self._is_known[token_ids]])
        end = self._num_known + len(new)
        if end > len(self._known):
            self._known = np.concatenate([self._known, np.zeros(end, dtype=np.int64)])
        self._known[self._num_known : end] = new
        self._num_known = end
        self._is_known[new] = True

    def add(self, token_ids: npt.NDArray[np.integer]) -> None:
        """Count further tokens of the sequence."""
        token_ids = token_ids[token_ids < len(self.counts)]
        self.add_uncounted(token_ids)
        np.add.at(self.counts, token_ids, 1)


class EditedRow:
    """The edits of one admitted request.

    Args:
        request: the request, whose `metadata` are SamplingParams.
        serial: serial of the request's admission.
        vocab_size: number of logits of a row; higher token ids are ignored.
        bad_words: token sequences of the bad words, from `bad_word_sequences`.
        grammar: grammar of the request's text; None: any text is allowed.
    """

    __slots__ = (
        "_allowed",
        "_bad_words",
        "_bias_ids",
        "_bias_values",
        "_counts",
        "_eos_ids",
        "_grammar",
        "_num_counted",
        "_num_starting",
        "_params",
        "_request",
        "_stop_ids",
        "_vocab_size",
        "serial",
    )

    def __init__(
        self,
        request: Request,
        serial: int,
        vocab_size: int,
        bad_words: Sequence[tuple[int, ...]],
        grammar: RequestGrammar | None = None,
    ) -> None:
        params: SamplingParams = request.metadata
        self.serial = serial
        self._request = request
        self._params = params
        self._vocab_size = vocab_size
        self._bad_words = bad_words
        # Number of tokens before the last token of the longest bad word.
        self._num_starting = max((len(word) - 1 for word in bad_words), default=0)
        self._allowed = None if params.allowed_token_ids is None else _valid_ids(params.allowed_token_ids, vocab_size)
        self._stop_ids = _valid_ids(sorted(request.stop_set.union(request.eos_token_ids)), vocab_size)
        self._eos_ids = _valid_ids(request.eos_token_ids, vocab_size)
        self._grammar = grammar
        biases = {token: bias for token, bias in (params.logit_bias or {}).items() if token < vocab_size}
        self._bias_ids = np.array(list(biases), dtype=np.int64)
        self._bias_values = np.array(list(biases.values()), dtype=np.float32)
        self._counts: TokenCounts | None = None
        self._num_counted = 0  # number of output tokens in `_counts`

    def edit(self, row: int, position: int, edits: LogitEdits) -> None:
        """Add to `edits` the edits of row `row` of the logits, from which the token at `position` is drawn.

        Raises:
            GrammarError: the grammar cannot compute the tokens that it allows.
        """
        num_output = position - self._request.num_prompt_tokens
        num_missing = max(0, num_output - self._request.num_output_tokens)
        if self._grammar is not None:
            if self._mask_by_grammar(self._grammar, row, num_output, edits):
                return
            if self._params.ignore_eos:
                edits.mask(row, self._eos_ids)
        if self._allowed is not None:
            edits.allow(row, self._allowed)
        if self._bad_words:
            start = max(0, num_output - self._num_starting)
            known = self._request.output_since(start)[: num_output - start].tolist() if self._num_starting else []
            finish = partial(self._mask_bad_words, row, known)
            edits.add(row, num_missing if self._num_starting else 0, finish)
        if num_output < self._params.min_tokens:
            edits.mask(row, self._stop_ids)
        if len(self._bias_ids):
            edits.bias(row, self._bias_ids, self._bias_values)
        if self._params.has_penalties:
            edits.add(row, num_missing, self._prepare_penalties(row, num_output))

    def _mask_by_grammar(self, grammar: RequestGrammar, row: int, num_output: int, edits: LogitEdits) -> bool:
        """Mask the tokens that the grammar does not allow; returns whether the grammar allows only the end of the
        text."""
        if grammar.num_accepted > num_output:
            grammar.rewind(num_output)
        known = grammar.num_accepted
        new = self._request.output_since(known)[: num_output - known].tolist() if known < num_output else ()
        return grammar.mask(new, row, edits.token_masks(self._vocab_size))

    def _mask_bad_words(self, row: int, known: list[int], edits: LogitEdits, newest: list[int]) -> None:
        """Mask the tokens that would complete a bad word; `known`, then `newest` are the last tokens of the output."""
        edits.mask(row, self._completed_bad_words([*known, *newest]))

    def _completed_bad_words(self, output: list[int]) -> Int64Array:
        """The last token of each bad word whose other tokens are the last tokens of the output. `output` may be
        shortened at its start."""
        found = []
        for *start, last in self._bad_words:
            if last < self._vocab_size and (not start or output[-len(start) :] == start):
                found.append(last)
        return _valid_ids(found, self._vocab_size)

    def _prepare_penalties(self, row: int, num_output: int) -> Finish:
        """Count the known output tokens; returns a function that penalises these tokens and the newest tokens."""
        params = self._params
        if self._counts is None or self._num_counted > num_output:
            self._counts = TokenCounts(self._vocab_size)
            self._num_counted = 0
            if params.repetition_penalty != 1:
                self._counts.add_uncounted(self._request.prompt_token_ids)
        if self._num_counted < num_output:
            new = self._request.output_since(self._num_counted)[: num_output - self._num_counted]
            self._counts.add(new)
            self._num_counted += len(new)
        token_ids = self._counts.known.copy()
        return partial(_penalize, row, params, token_ids, self._counts.counts[token_ids], self._vocab_size)


def _penalize(
    row: int,
    params: SamplingParams,
    token_ids: Int64Array,
    counts: npt.NDArray[np.int32],
    vocab_size: int,
    edits: LogitEdits,
    newest: list[int],
) -> None:
    """Penalise `token_ids`, which occur `counts` times in the known output (0: only in the prompt), and the `newest`
    tokens."""
    for token in newest:
        if token < vocab_size:
            at = (token_ids == token).nonzero()[0]
            if not len(at):
                at, token_ids, counts = len(token_ids), np.append(token_ids, token), np.append(counts, np.int32(0))
            counts[at] += 1
    subtracted = counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    edits.penalize(row, token_ids, params.repetition_penalty, subtracted.astype(np.float32))


@dataclass(slots=True)
class UnfinishedEdit:
    """An edit that depends on tokens that were not yet sampled when the step was prepared."""

    row: int
    """Row of the logits that the edit changes."""
    num_missing: int
    """Number of unknown tokens just before the token to be drawn."""
    finish: Finish
    sources: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[num_missing] places in `SampledTokens` where the unknown tokens will be stored; set by the runner."""


class LogitEdits:
    """The edits of the logits of one step, by row.

    Args:
        num_rows: number of rows of the logits.
    """

    def __init__(self, num_rows: int = 1) -> None:
        self._num_rows = num_rows
        self.unfinished: list[UnfinishedEdit] = []
        self._token_masks: TokenMasks | None = None
        self._allowed: list[tuple[int, Int64Array]] = []
        self._masks = _Places()
        self._biases = _Places()
        self._penalties = _Places()

    def __bool__(self) -> bool:
        found = self._allowed or self._masks or self._biases or self._penalties or self._token_masks or self.unfinished
        return bool(found)

    def add(self, row: int, num_missing: int, finish: Finish) -> None:
        """Add the edit that `finish` makes: now, or, if `num_missing` newest tokens of the request are unknown, once
        they are known."""
        if num_missing:
            self.unfinished.append(UnfinishedEdit(row, num_missing, finish))
        else:
            finish(self, [])

    def finish(self, get_tokens: Callable[[Int64Array], Int64Array]) -> dict[int, str]:
        """Complete the unfinished edits, now that `get_tokens` can return their missing tokens. If edits raise, the
        result has their error messages, keyed by row of the logits."""
        errors: dict[int, str] = {}
        for edit in self.unfinished:
            token_ids = get_tokens(edit.sources).tolist()
            try:
                edit.finish(self, token_ids)
            except Exception as error:
                errors[edit.row] = failure_detail(error)
        self.unfinished.clear()
        return errors

    def of_row(self, row: int) -> LogitEdits:
        """The edits of one row of the logits, as edits of row 0. All edits must be finished."""
        one = LogitEdits()
        one._allowed = [(0, token_ids) for at, token_ids in self._allowed if at == row]
        one._masks, one._biases = self._masks.of_row(row), self._biases.of_row(row)
        one._penalties = self._penalties.of_row(row)
        one._token_masks = None if self._token_masks is None else self._token_masks.of_row(row)
        return one

    def token_masks(self, vocab_size: int) -> TokenMasks:
        """The step's token masks, to which each grammar writes the tokens that it allows."""
        if self._token_masks is None:
            self._token_masks = TokenMasks(self._num_rows, vocab_size)
        return self._token_masks

    def allow(self, row: int, token_ids: Int64Array) -> None:
        """Allow only the tokens `token_ids` in a row."""
        self._allowed.append((row, token_ids))

    def mask(self, row: int, token_ids: Int64Array) -> None:
        """Exclude the tokens `token_ids` in a row."""
        self._masks.add(row, token_ids)

    def bias(self, row: int, token_ids: Int64Array, values: Float32Array) -> None:
        """Add `values` to the logits of `token_ids` in a row. The tokens must be distinct."""
        self._biases.add(row, token_ids, values)

    def penalize(self, row: int, token_ids: Int64Array, repetition: float, subtracted: Float32Array) -> None:
        """Divide the positive logits of `token_ids` in a row by `repetition`, multiply the negative logits by
        `repetition`, then subtract the values `subtracted`. The tokens must be distinct."""
        self._penalties.add(row, token_ids, np.full(len(token_ids), repetition, dtype=np.float32), subtracted)

    def apply(self, logits: Tensor) -> Tensor:
        """A copy of the logits with all edits applied, [n, vocab_size] float32. All edits must be finished."""
        logits = logits.to(torch.float32, copy=True)
        for row, token_ids in self._allowed:
            ids = torch.from_numpy(token_ids).to(logits.device)
            kept = logits[row, ids]
            logits[row] = MINUS_INFINITY
            logits[row, ids] = kept
        if self._masks:
            (place, _) = self._masks.tensors(logits.device)
            logits[place] = MINUS_INFINITY
        if self._biases:
            place, (values,) = self._biases.tensors(logits.device)
            logits[place] += values
        if self._penalties:
            place, (repetition, subtracted) = self._penalties.tensors(logits.device)
            before = logits[place]
            logits[place] = torch.where(before > 0, before / repetition, before * repetition) - subtracted
        if self._token_masks:
            self._token_masks.apply(logits)
        return logits


class _Places:
    """Collects places (row, token) in the logits, with one or more values for each place."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._token_ids: list[Int64Array] = []
        self._values: list[tuple[Float32Array, ...]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, token_ids: Int64Array, *values: Float32Array) -> None:
        if len(token_ids):
            self._rows.append(row)
            self._token_ids.append(token_ids)
            self._values.append(values)

    def of_row(self, row: int) -> _Places:
        """The places and values in one row of the logits, as places in row 0."""
        one = _Places()
        for at, token_ids, values in zip(self._rows, self._token_ids, self._values, strict=True):
            if at == row:
                one.add(0, token_ids, *values)
        return one

    def tensors(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """The index tensors (rows, tokens) of all places in the logits, and the values of the places in the same
        order."""
        rows = np.repeat(np.array(self._rows), [len(ids) for ids in self._token_ids])
        place = torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate(self._token_ids)).to(device)
        columns = zip(*self._values, strict=True)
        return place, [torch.from_numpy(np.concatenate(column)).to(device) for column in columns]


def bad_word_sequences(tokenizer: Any, bad_words: Sequence[str]) -> list[tuple[int, ...]]:
    """The token sequences of bad words. Each word has two sequences, without and with a space before the word, because
    tokenizers encode the two texts differently.

    Raises:
        ValueError: there is no tokenizer, or a word is not valid Unicode text.
    """
    if bad_words and tokenizer is None:
        raise ValueError(f"bad_words is {bad_words[0]!r} and the model has no tokenizer; use logit_bias with token ids")
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            try:
                token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            except TypeError:  # tokenizers raises it for lone surrogates, which UTF-8 cannot encode
                raise ValueError(f"bad_words holds {word!r}, which is not valid Unicode text; remove it") from None
            if token_ids:
                found[token_ids] = None
    return list(found)


def _valid_ids(token_ids: Sequence[int], vocab_size: int) -> Int64Array:
    return np.array(sorted({token for token in token_ids if token < vocab_size}), dtype=np.int64)
