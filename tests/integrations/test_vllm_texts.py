"""Texts equal real vLLM's at every position of a hard text, with the tokenizers of published models.

After a prompt that ends within a character they differ, as the test states.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pointsman.engine import Engine, RequestOutput, RequestOutputKind, SamplingParams
from pointsman.engine.text.detokenizer import TextDecoder
from tests.engine.real import weights
from tests.engine.real_tokenizers import NAMES, config_for, tokenizer_of
from tests.engine.text_tokenizers import HARD_TEXT
from tests.engine.tiny_models import build
from tests.integrations.vllm_process import NEEDS_VLLM, run_in_vllm

REPLACEMENT = "\ufffd"

pytestmark = [*NEEDS_VLLM, pytest.mark.long]


@pytest.mark.parametrize("name", [*NAMES, *weights.NAMES])
def test_decoded_texts_equal_those_of_vllm(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    build(config_for(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    token_ids = tokenizer(HARD_TEXT, add_special_tokens=False)["input_ids"]
    theirs = run_in_vllm("vllm_texts.py", tmp_path, json.dumps(token_ids), timeout=600)
    ours = outputs_of(Engine(str(tmp_path), num_blocks=256, block_size=16), token_ids)
    decoder, num_whole = TextDecoder(tokenizer), 0
    for split, text, decoded in zip(range(1, len(token_ids)), theirs["texts"], theirs["decoded"], strict=True):
        output, prompt = ours[split], token_ids[:split]
        assert output.outputs[0].logprobs is not None
        own = output.outputs[0].logprobs[0][token_ids[split]].decoded_token
        if not decoder.incomplete_bytes(prompt):
            num_whole += 1
            # An unfinished character is a replacement character in our text, and missing in theirs.
            assert (output.text.rstrip(REPLACEMENT), own) == (text or output.text.rstrip(REPLACEMENT), decoded)
        elif decoder.incomplete_bytes([*prompt, token_ids[split]]):
            assert (own, decoded, text) == ("", "", "") and set(output.text) == {REPLACEMENT}
        else:  # theirs repeats the prompt's text before the character that the output completes
            assert text == decoder.prompt_text(prompt) + output.text and own is not None and own.endswith(output.text)
    assert num_whole > len(token_ids) / 2
    last = ours[len(token_ids) - 1].prompt_logprobs
    assert last is not None
    described = [
        entry[token_id].decoded_token for token_id, entry in zip(token_ids[1:], last[1:], strict=False) if entry
    ]
    assert described == theirs["prompt"]


def outputs_of(engine: Engine, token_ids: list[int]) -> dict[int, RequestOutput]:
    """The outputs, by the length of the prompt."""
    for split in range(1, len(token_ids)):
        params = SamplingParams(
            max_tokens=1, temperature=0, allowed_token_ids=[token_ids[split]], ignore_eos=True, logprobs=0,
            prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        engine.add_request(str(split), token_ids[:split], params)
    found: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        found |= {int(output.request_id): output for output in engine.step()}
    return found
