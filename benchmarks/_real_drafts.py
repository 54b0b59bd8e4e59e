"""Gain of prompt lookup on real work: code edits, summaries and chats, with and without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from _common import Targets, note, paired_ratio, print_table
from _real_texts import Message, work
from speculation import DRAFTS, Workload, open_sides, take_turns

from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.text.tokenizer import encode, render_chat

ROUNDS, ROUNDS_QUICK = 2, 1
OUTPUT_TOKENS, OUTPUT_TOKENS_QUICK = 120, 24
ENGINE = {"num_blocks": 64, "max_model_len": 2_048, "max_num_batched_tokens": 2_048}
"""A step computes the longest prompt at once, so prompts are not part of the measured steps."""
MIN_RATIO = {"code edit, begun": 1.3}
"""Tokens per second with drafts / without, by kind of work."""
MIN_RATIO_OF_OTHERS, MIN_RATIO_OF_OTHERS_QUICK = 0.95, 0.8


def measure_drafts(model: LoadedModel, quick: bool, targets: Targets) -> dict[str, Any]:
    """Measure prompt lookup on each kind of work; returns the figures by kind."""
    rounds, num_tokens = (ROUNDS_QUICK, OUTPUT_TOKENS_QUICK) if quick else (ROUNDS, OUTPUT_TOKENS)
    of_others = MIN_RATIO_OF_OTHERS_QUICK if quick else MIN_RATIO_OF_OTHERS
    found = {}
    for kind, conversations in work(quick).items():
        note(f"drafts: {kind}")
        workload = Workload(kind, 1, 0.0, MIN_RATIO.get(kind, of_others), ignores_eos=False)
        prompts = [_prompt(model.tokenizer, conversation) for conversation in conversations]
        found[kind] = each = _measure(model, workload, prompts * rounds, num_tokens)
        targets.at_least(f"{kind}: tokens per second with drafts / without", each["ratio"], workload.least)
        targets.holds(f"{kind}: {each['num_equal']} of {each['num_outputs']} outputs are equal", each["is_equal"])
    if quick:
        targets.skip("drafts in other work", "--quick")
    keys = ("prompt_tokens", "acceptance", "tokens_per_step", "ms_per_token", "ms_per_token_with_drafts", "ratio")
    print_table(
        f"up to {DRAFTS} drafts, one request at a time, up to {num_tokens} tokens",
        ["work", "prompt", "drafts accepted", "tokens a step", "ms a token", "with drafts", "speed with / without"],
        [[kind, *(each[key] for key in keys)] for kind, each in found.items()],
    )
    return found


def _prompt(tokenizer: Any, conversation: Sequence[Message]) -> list[int]:
    is_begun = conversation[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not is_begun, "continue_final_message": is_begun}
    return encode(tokenizer, render_chat(tokenizer, conversation, options), add_special_tokens=False)


def _measure(
    model: LoadedModel, workload: Workload, prompts: Sequence[list[int]], num_tokens: int
) -> dict[str, float | int | bool]:
    """Run each prompt on both sides alternately."""
    sides = plain, drafting = open_sides(model, 1, **ENGINE)
    num_equal = 0
    for prompt in prompts:
        for side in sides:
            side.begin(workload, [prompt], num_tokens)
        take_turns(sides)
        num_equal += plain.answers == drafting.answers
    stats, counters = drafting.engine.scheduler.stats(), drafting.engine.counters
    for side in sides:
        side.engine.close()
    return {
        "prompt_tokens": round(median(map(len, prompts))),
        "acceptance": round(stats.num_accepted_tokens / max(stats.num_draft_tokens, 1), 4),
        "tokens_per_step": round(counters.num_generated_tokens / counters.num_steps, 4),
        "ms_per_token": round(1e3 / median(plain.tokens_per_second), 3),
        "ms_per_token_with_drafts": round(1e3 / median(drafting.tokens_per_second), 3),
        "ratio": round(paired_ratio(drafting.tokens_per_second, plain.tokens_per_second), 4),
        "num_outputs": len(prompts),
        "num_equal": num_equal,
        "is_equal": num_equal == len(prompts),
    }
