"""RequestGrammar: follows a request's output through its grammar, and masks the tokens that may not follow.

A `RequestGrammar` accepts new output tokens, and rewinds if the output becomes shorter. So the allowed tokens depend on
the output alone, not on the time or the other requests of a step.

EOS may follow a complete text. While more text may follow too, `min_tokens` and `ignore_eos` can forbid EOS. When
nothing but EOS may follow, EOS is sampled regardless of other parameters: the request ends with its grammar.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pointsman.engine.errors import GRAMMAR_TOO_SLOW, GrammarError, first_line

if TYPE_CHECKING:
    from pointsman.core import Request
    from pointsman.engine.grammar.process import CompiledGrammar

BITS = 32
"""Number of tokens per word of a bit mask."""


class TokenMasks:
    """Bit masks of the tokens that grammars allow in one step, 32 tokens per word, for the rows that have a grammar.

    Args:
        num_rows: number of rows of the step's logits.
        vocab_size: number of tokens per row of logits.
    """

    __slots__ = ("_rows", "_vocab_size", "words")

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[int] = []
        self.words = torch.empty((num_rows, -(-vocab_size // BITS)), dtype=torch.int32)
        """[num_rows, ceil(vocab_size / 32)] int32 on the CPU: a bit per token, 1 if it is allowed; only rows that were
        added are valid."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int) -> None:
        """Add a row whose mask words have been written."""
        self._rows.append(row)

    def of_row(self, row: int) -> TokenMasks:
        """The masks of a single row, for logits [1, vocab_size]."""
        one = TokenMasks(1, self._vocab_size)
        one.words = self.words[row : row + 1]
        one._rows = [0] if row in self._rows else []
        return one

    def apply(self, logits: Tensor) -> None:
        """Set logits [num_rows, vocab_size] of forbidden tokens to minus infinity, in place."""
        from xgrammar import apply_token_bitmask_inplace

        is_cpu = logits.device.type == "cpu"
        apply_token_bitmask_inplace(
            logits,
            self.words if is_cpu else self.words.to(logits.device),
            vocab_size=self._vocab_size,
            indices=None if len(self._rows) == len(logits) else self._rows,
            backend="cpu" if is_cpu else "torch_native",
        )


class RequestGrammar:
    """The state of one request's output in its grammar.

    Args:
        request: the request, whose `metadata` are SamplingParams with `structured_outputs`.
        grammar: the compiled grammar of these `structured_outputs`.
    """

    __slots__ = ("_limits", "_matcher", "_num_stop_ids", "_seconds", "num_accepted")

    def __init__(self, request: Request, grammar: CompiledGrammar) -> None:
        from xgrammar import GrammarMatcher

        vocabulary = grammar.vocabulary
        # A stop token without text (such as the end of a turn) ends a text like EOS; a stop token with text is part of
        # it.
        tokens = vocabulary.tokens
        silent = [token_id for token_id in request.stop_token_ids if token_id < len(tokens) and not tokens[token_id]]
        stop_ids = sorted({*vocabulary.stop_token_ids, *silent})
        self._num_stop_ids = len(stop_ids)
        self._matcher = GrammarMatcher(grammar.compiled, override_stop_tokens=stop_ids)
        self._limits = grammar.limits
        self._seconds = 0.0
        self.num_accepted = 0
        """Number of output tokens that were accepted."""

    def rewind(self, num_tokens: int) -> None:
        """Undo the acceptance of all tokens after the first `num_tokens`."""
        self._matcher.rollback(self.num_accepted - num_tokens)
        self.num_accepted = num_tokens

    def mask(self, new_token_ids: Sequence[int], row: int, masks: TokenMasks) -> bool:
        """Accept the output's new tokens, and write a mask of the tokens that may follow to a row of `masks`.

        Returns:
            Whether the text is complete and only EOS may follow.

        Raises:
            GrammarError: the grammar does not allow the tokens, or takes too long.
        """
        started = time.thread_time()  # processor time, because a busy machine is not the grammar's fault
        try:
            for token_id in new_token_ids:
                if not self._matcher.accept_token(token_id):
                    raise GrammarError(f"the grammar does not allow token {token_id} as the next token of the output")
                self.num_accepted += 1
            self._matcher.fill_next_token_bitmask(masks.words, row)
            is_completed = self._matcher.is_completed()
        except RuntimeError as error:
            raise GrammarError(f"xgrammar failed: {first_line(error)}") from error
        self._seconds += time.thread_time() - started
        limit = self._limits.start_time + self._limits.token_time * (self.num_accepted + 1)
        if self._seconds > limit:
            raise GrammarError(
                f"{GRAMMAR_TOO_SLOW} {self._seconds:.2f} s of processor time for {self.num_accepted} tokens, and the "
                f"limit is {limit:.2f} s; simplify it (rules that allow one text in many ways are slow)"
            )
        masks.add(row)
        if not is_completed:
            return False
        allowed = int(np.bitwise_count(masks.words[row].numpy().view(np.uint32)).sum())
        return allowed == self._num_stop_ids
