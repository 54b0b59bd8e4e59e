"""Tests texts against a grammar, with a vocabulary of the 256 bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import xgrammar

from pointsman.engine import StructuredOutputsParams
from pointsman.engine.grammar.worker import read_tree
from pointsman.engine.params.structured_outputs import MAX_WHITESPACE

EOS = 256


@cache
def _compiler() -> xgrammar.GrammarCompiler:
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class Language:
    """The texts of a grammar, which is given as to `StructuredOutputsParams`.

    Raises:
        ValueError: it cannot be used, or allows no text.
    """

    def __init__(self, **options: Any) -> None:
        spec = StructuredOutputsParams(**options).spec
        tree = read_tree({**spec._asdict(), "max_whitespace": MAX_WHITESPACE})
        if not tree.remove_empty_options():
            raise ValueError("it allows no text")
        self._compiled = _compiler().compile_grammar(tree.grammar())

    def __contains__(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return all(matcher.accept_token(byte) for byte in text.encode("utf-8", "surrogatepass")) and (
            matcher.accept_token(EOS)
        )

    def allows(self, *texts: str) -> list[str]:
        """The texts among those given that the grammar allows."""
        return [text for text in texts if text in self]
