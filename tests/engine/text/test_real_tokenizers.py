"""With the tokenizers of published and of named models, prompt text and output text join to the whole text, wherever a
difficult text is split."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest

from pointsman.engine import Engine, RequestOutputKind, SamplingParams
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.text.detokenizer import TextDecoder
from tests.engine.real import weights
from tests.engine.real_tokenizers import NAMES, config_for, tokenizer_of
from tests.engine.text_tokenizers import HARD_TEXT
from tests.engine.tiny_models import build

pytestmark = [pytest.mark.e2e, pytest.mark.long]

REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module", params=[*NAMES, *weights.NAMES])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer_of(request.param)


def test_prompt_and_output_join_to_the_whole_text_at_any_split(tokenizer: Any) -> None:
    decoder = TextDecoder(tokenizer)
    token_ids = tokenizer(HARD_TEXT, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(token_ids)
    assert unicodedata.normalize("NFC", whole) == unicodedata.normalize("NFC", HARD_TEXT)
    pieces = [decoder.first_token_bytes(token_ids[0]), *map(decoder.token_bytes, token_ids[1:])]
    assert b"".join(pieces).decode() == whole
    added = [decoder.added_text(token_id, token_ids[:index]) for index, token_id in enumerate(token_ids)]
    assert "".join(added).removeprefix(" ") == whole and REPLACEMENT not in "".join(added)
    for split in range(len(token_ids) + 1):
        prompt, output = token_ids[:split], token_ids[split:]
        for before in (prompt, [*tokenizer("")["input_ids"], *prompt]):
            stream = decoder.stream()
            stream.continue_prompt(before)
            text = stream.decode_rest(output)
            assert "".join([*map(stream.feed, output), stream.flush()]) == text
            assert decoder.prompt_text(prompt) + text == whole
        verbatim = decoder.stream(is_verbatim=True)
        text = "".join([*map(verbatim.feed, output), verbatim.flush()])
        joined = b"".join(map(decoder.token_bytes, output))
        assert text.lstrip(REPLACEMENT) == joined.decode("utf-8", "replace").lstrip(REPLACEMENT)


def test_engine_outputs_continue_prompts_cut_anywhere(tokenizer: Any) -> None:
    engine = Engine(wrap_model(build(config_for(tokenizer)), tokenizer=tokenizer), num_blocks=256, block_size=16)
    decoder = TextDecoder(tokenizer)
    token_ids = tokenizer(HARD_TEXT, add_special_tokens=False)["input_ids"]
    for split in range(1, len(token_ids)):
        params = SamplingParams(
            max_tokens=1, allowed_token_ids=[token_ids[split]], logprobs=2, prompt_logprobs=1, ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        engine.add_request(str(split), token_ids[:split], params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            split = int(output.request_id)
            text = decoder.prompt_text(token_ids[:split]) + output.text
            assert text.rstrip(REPLACEMENT) == decoder.prompt_text(token_ids[: split + 1])
            entries = output.prompt_logprobs
            assert entries is not None and output.outputs[0].logprobs is not None
            described = [*entries[1:], *output.outputs[0].logprobs]
            own = zip(token_ids[1 : split + 1], described, strict=True)
            added = "".join(entry[token_id].decoded_token or "" for token_id, entry in own if entry is not None)
            whole = decoder.prompt_text(token_ids[: split + 1])  # a space may wait in a token with half a character
            assert whole.rstrip(" ").endswith(added.rstrip(" ")) and REPLACEMENT not in added
