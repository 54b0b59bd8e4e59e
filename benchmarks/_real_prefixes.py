"""Prefix hits of a chat of ten turns: the cached share of each prompt, and its effect on the time to the first token.

Each turn sends the whole conversation again, as clients of a chat API do: the template renders it, the tokenizer
encodes it. A turn's prompt continues the tokens of the turn before only if the text of an output is encoded as the
tokens that were generated. Computed tokens that are not found have two causes, which are counted separately: the text
was encoded differently, or it ends within a block.

A greedy model mostly writes the tokens that the tokenizer would choose. A sampling model may not, so sampled outputs
are encoded again as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from _common import Targets, note, print_table
from _real_texts import CHAT

from pointsman.engine import SamplingParams
from pointsman.engine.llm import LLM
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.outputs.request_output import RequestOutput
from pointsman.engine.text.tokenizer import encode

ANSWER_TOKENS, ANSWER_TOKENS_QUICK = 120, 16
TURNS_QUICK = 4
SAMPLED_TOKENS, SAMPLED_TOKENS_QUICK = 100, 8
ENGINE = {"num_blocks": 64, "max_model_len": 2_048, "max_num_batched_tokens": 2_048, "num_threads": 1}
"""A step computes the whole prompt, so the number of steps is not compared."""
MIN_TTFT_RATIO, MIN_TTFT_RATIO_QUICK = 5.0, 1.5
"""Minimum ratio of the last turn's TTFT: without the cache / with it."""


class Chat:
    """A conversation on an engine of its own.

    Args:
        model: with a chat template.
        enable_prefix_caching: whether the engine has a prefix cache.
    """

    def __init__(self, model: LoadedModel, enable_prefix_caching: bool) -> None:
        self.llm = LLM(model, log_stats_interval=None, enable_prefix_caching=enable_prefix_caching, **ENGINE)
        self.block_size = self.llm.engine.scheduler.config.block_size
        self.messages: list[dict[str, str]] = []
        self.outputs: list[RequestOutput] = []

    def ask(self, question: str, max_tokens: int) -> RequestOutput:
        """Generate the output of the next turn of the conversation."""
        self.messages.append({"role": "user", "content": question})
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        (output,) = self.llm.chat(self.messages, params, use_tqdm=False)
        self.messages.append({"role": "assistant", "content": output.outputs[0].text})
        self.outputs.append(output)
        return output


def measure_prefixes(model: LoadedModel, quick: bool, targets: Targets) -> dict[str, Any]:
    """Measure the chat with and without the prefix cache; returns the figures by turn."""
    questions, num_tokens = (CHAT[:TURNS_QUICK], ANSWER_TOKENS_QUICK) if quick else (CHAT, ANSWER_TOKENS)
    cached, plain = Chat(model, True), Chat(model, False)
    turns: list[dict[str, Any]] = []
    before: list[int] = []
    for number, question in enumerate(questions, start=1):
        note(f"prefixes: turn {number}")
        output, other = cached.ask(question, num_tokens), plain.ask(question, num_tokens)
        prompt = list(output.prompt_token_ids)
        num_equal = _num_equal(before, prompt)
        turns.append(
            {
                "prompt_tokens": len(prompt),
                "hit": output.num_cached_tokens,
                "hit_share": round(output.num_cached_tokens / len(prompt), 4),
                "computed_before": len(before),
                "encoded_otherwise": len(before) - num_equal,
                "within_a_block": num_equal - output.num_cached_tokens,
                "ttft_ms": round(1e3 * _ttft(output), 2),
                "ttft_ms_without_cache": round(1e3 * _ttft(other), 2),
                "is_equal": output.outputs[0].token_ids == other.outputs[0].token_ids,
            }
        )
        # The last token of an output is never computed: it is an end of sequence, or the next step would compute it.
        before = prompt + list(output.outputs[0].token_ids)[:-1]
    print_table(
        f"a chat of {len(turns)} turns, blocks of {cached.block_size} tokens",
        ["turn", "prompt", "hit", "share", "encoded otherwise", "within a block", "TTFT, ms", "without cache"],
        [
            [
                number,
                *(turn[key] for key in ("prompt_tokens", "hit", "hit_share", "encoded_otherwise", "within_a_block")),
                turn["ttft_ms"],
                turn["ttft_ms_without_cache"],
            ]
            for number, turn in enumerate(turns, start=1)
        ],
    )
    later = turns[1:]
    share = sum(turn["hit"] for turn in later) / sum(turn["computed_before"] for turn in later)
    ratio = turns[-1]["ttft_ms_without_cache"] / turns[-1]["ttft_ms"]
    num_whole = sum(turn["within_a_block"] < cached.block_size for turn in later)
    targets.holds(f"{num_whole} of {len(later)} turns hit every whole block of their prefix", num_whole == len(later))
    targets.at_least(
        f"TTFT of turn {len(turns)} without the prefix cache / with it",
        ratio,
        MIN_TTFT_RATIO_QUICK if quick else MIN_TTFT_RATIO,
    )
    num_equal = sum(turn["is_equal"] for turn in turns)
    targets.holds(f"{num_equal} of {len(turns)} answers are equal without the cache", num_equal == len(turns))
    sampled = _encode_outputs_again(cached.llm, SAMPLED_TOKENS_QUICK if quick else SAMPLED_TOKENS)
    note(
        f"sampled at temperature 1: {sampled['encoded_otherwise']} of {sampled['answers']} answers are encoded "
        f"otherwise, {sampled['lost']} of {sampled['tokens']} tokens are behind the first difference"
    )
    return {"turns": turns, "hit_share": round(share, 4), "ttft_ratio": round(ratio, 3), "sampled": sampled}


def _encode_outputs_again(llm: LLM, num_tokens: int) -> dict[str, int]:
    """How the tokens of sampled outputs change when their text is encoded."""
    conversations = [[{"role": "user", "content": question}] for question in CHAT]
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=num_tokens) for seed in range(len(CHAT))]
    found = {"answers": 0, "encoded_otherwise": 0, "tokens": 0, "lost": 0}
    for output in llm.chat(conversations, params, use_tqdm=False):
        answer = output.outputs[0]
        token_ids = list(answer.token_ids)[: -1 if answer.finish_reason == "stop" else None]  # without the end
        again = encode(llm.get_tokenizer(), answer.text, add_special_tokens=False)
        num_lost = len(token_ids) - _num_equal(token_ids, again)
        found["answers"] += 1
        found["encoded_otherwise"] += num_lost > 0
        found["tokens"] += len(token_ids)
        found["lost"] += num_lost
    return found


def _num_equal(before: Sequence[int], after: Sequence[int]) -> int:
    """Number of tokens in the common prefix of two token sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))


def _ttft(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None
    return metrics.first_token_time - metrics.arrival_time
