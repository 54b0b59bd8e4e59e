"""Published models: log probabilities, stop strings, structured output and chats, on texts that make sense."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from transformers import AutoTokenizer

from pointsman.engine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.engine.real.prompts import BY_LANGUAGE, SOME_PROMPTS
from tests.engine.real.reference import exported, loaded, reference, token_ids_of
from tests.engine.real.weights import NAMES
from tests.forms import short_of

pytestmark = pytest.mark.e2e

CHATS: dict[str, list[dict[str, str]]] = {
    "user": [{"role": "user", "content": "Name a colour."}],
    "system": [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Name a colour."}],
    "turns": [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Другой цвет? 别的颜色? \U0001f40d"},
    ],
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {
            "type": "array",
            "items": {"enum": ["English", "French", "Arabic"]},
            "minItems": 1,
            "maxItems": 3,
        },
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "is_home": {"type": "boolean"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "languages", "address"],
    "additionalProperties": False,
}

COMPILE_TIME = 120.0
"""Limit in seconds for compiling a grammar while other tests run; alone it takes one to three."""


@pytest.fixture(scope="module", params=short_of(NAMES, ["smollm2"]))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def llm(name: str) -> LLM:
    return LLM(loaded(name), max_model_len=1024, num_blocks=600, block_size=16, grammar_timeout=COMPILE_TIME)


def complete(llm: LLM, prompts: Any, **params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(**{"temperature": 0.0, **params}), use_tqdm=False)


def test_log_probabilities_equal_transformers(name: str, llm: LLM) -> None:
    """The most likely tokens, their order and their log probabilities are equal, for outputs and prompts."""
    texts = list(SOME_PROMPTS[:3])
    for text, output in zip(texts, complete(llm, texts, max_tokens=6, logprobs=5, prompt_logprobs=5), strict=True):
        prompt = token_ids_of(name, text)
        assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        tokens = [*prompt[1:], *output.token_ids]
        rows = reference(name).logits(prompt[:1], tokens).log_softmax(-1)
        for row, token, entry in zip(rows, tokens, entries, strict=True):
            assert entry is not None
            for other, found in entry.items():
                assert found.logprob == pytest.approx(float(row[other]), abs=1e-4)
            likeliest = sorted(entry, key=lambda other: -entry[other].logprob)[:5]
            assert [float(row[other]) for other in likeliest] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
            assert token in entry


def test_a_stop_string_within_a_token_ends_the_text_there(llm: LLM) -> None:
    prompt = SOME_PROMPTS[0]
    whole = complete(llm, prompt, max_tokens=12, logprobs=0)[0]
    assert whole.outputs[0].logprobs is not None
    pieces = [
        entry[token].decoded_token or ""
        for token, entry in zip(whole.token_ids, whole.outputs[0].logprobs, strict=True)
    ]
    number, piece = next((number, piece) for number, piece in enumerate(pieces) if len(piece.strip()) >= 4)
    stop = piece.strip()[1:3]
    place = whole.text.index(stop)
    assert place < len("".join(pieces[: number + 1])), f"{stop!r} ends within token {number}, {piece!r}"
    for includes in (False, True):
        output = complete(llm, prompt, max_tokens=12, stop=[stop], include_stop_str_in_output=includes)[0]
        assert output.text == whole.text[: place + len(stop) * includes]
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]


def test_a_stop_string_across_tokens_is_found_in_any_script(llm: LLM) -> None:
    texts = [prompts[0] for prompts in BY_LANGUAGE.values()]
    whole = [output.text for output in complete(llm, texts, max_tokens=12)]
    stops = [text[len(text) // 2 :][:4] for text in whole]
    params = [SamplingParams(temperature=0.0, max_tokens=12, stop=[stop]) for stop in stops]
    for text, stop, output in zip(whole, stops, llm.generate(texts, params, use_tqdm=False), strict=True):
        assert output.text == text[: text.index(stop)]
        assert output.outputs[0].stop_reason == stop


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_outputs_are_valid_under_their_schema(llm: LLM, temperature: float) -> None:
    prompts = [f"{text}\n\nA person as JSON:\n" for text in SOME_PROMPTS]
    params = {"structured_outputs": StructuredOutputsParams(json=PERSON), "max_tokens": 200, "seed": 1}
    outputs = complete(llm, prompts, temperature=temperature, **params)
    ended = [output for output in outputs if output.finish_reason == "stop"]
    for output in ended:
        jsonschema.validate(json.loads(output.text), PERSON)
    assert len(ended) >= len(outputs) / 2, [output.text for output in outputs]


@pytest.mark.parametrize("chat", CHATS)
def test_chats_are_rendered_as_in_transformers(chat: str) -> None:
    """The chat template of a GGUF file gives the same prompt, with the same special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(exported("smollm2"))
    expected = tokenizer.apply_chat_template(CHATS[chat], add_generation_prompt=True, return_dict=False)
    llm = LLM(loaded("smollm2"), max_model_len=512, num_blocks=64, block_size=16)
    output = llm.chat(CHATS[chat], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)[0]
    assert output.prompt_token_ids == expected
    assert expected.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == len(CHATS[chat]) + 1 + (chat != "system")
    reference("smollm2").check_greedy(expected, output.token_ids)
    assert "<|im_" not in output.text
