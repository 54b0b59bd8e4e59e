"""Log probabilities in the JSON of the two APIs.

The engine gives one dictionary per position: token id -> `Logprob`, the token itself first, then the most likely ones
in their order (which may have the token itself among them; then it is there once). JSON has no infinities, so an
impossible token has -9999.0, as vLLM writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.engine.outputs.request_output import Logprob

LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """A log probability that JSON can hold; also of NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


class LogprobWriter:
    """Writes the log probabilities of one request.

    Args:
        num_top: most likely tokens per position.
        as_token_ids: whether tokens are written as "token_id:17", because several may have the same text.
    """

    def __init__(self, num_top: int, *, as_token_ids: bool = False) -> None:
        self._num_top = num_top
        self._as_token_ids = as_token_ids

    def token(self, token_id: int, text: str | None) -> str:
        """A token in the form that the client asked for."""
        return f"token_id:{token_id}" if self._as_token_ids or text is None else text

    # ------------------------------------------------------------------ completions

    def completion(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Mapping[int, Logprob] | None],
        *,
        offset: int = 0,
        first_text: str | None = None,
    ) -> dict[str, list[Any]]:
        """Four lists, one element per token.

        Args:
            token_ids: the tokens.
            entries: one per token; None: it has no log probability, being the first of a prompt.
            offset: characters of the text before the first token.
            first_text: the text of a token without an entry.
        """
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            if entry is None:
                text = self.token(token_id, first_text)
                token_logprobs.append(None)
                top_logprobs.append(None)
            else:
                own = entry[token_id]
                text = self.token(token_id, own.decoded_token)
                token_logprobs.append(finite(own.logprob))
                # OpenAI's rule: the sampled token is always included, so there may be one more than asked for.
                top_logprobs.append(
                    {
                        self.token(one, logprob.decoded_token): finite(logprob.logprob)
                        for one, logprob in islice(entry.items(), self._num_top + 1)
                    }
                )
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": token_logprobs,
            "tokens": tokens,
            "top_logprobs": top_logprobs,
        }

    # ------------------------------------------------------------------ chat

    def chat(self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]]) -> dict[str, list[Any]]:
        """One object per token, with the most likely ones in its place."""
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            likely = sorted(entry.items(), key=lambda one: -finite(one[1].logprob))[: self._num_top]
            content.append(
                {
                    **self._chat_token(token_id, entry[token_id]),
                    "top_logprobs": [self._chat_token(*one) for one in likely],
                }
            )
        return {"content": content}

    def _chat_token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = self.token(token_id, logprob.decoded_token)
        return {"token": text, "logprob": finite(logprob.logprob), "bytes": list(text.encode())}


def prompt_logprobs(entries: Sequence[Mapping[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    """Those of a prompt as vLLM writes them: token id -> its log probability, rank and text."""
    if entries is None:
        return None
    return [None if entry is None else _by_token_id(entry) for entry in entries]


def _by_token_id(entry: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in entry.items()
    }
