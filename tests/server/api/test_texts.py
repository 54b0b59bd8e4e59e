"""Texts and log probabilities of responses, for each way in which a tokenizer decodes.

The prompts end at every place of a difficult text, also within characters, and the outputs are forced. So each expected
response is known.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from pointsman.engine.text.detokenizer import TextDecoder
from pointsman.server.wire.responses import ChatCompletionResponse, CompletionResponse
from tests.engine.text_tokenizers import HARD_KINDS, HARD_TEXT
from tests.engine.tiny_models import FAMILIES, build
from tests.forked_engines import start_server
from tests.forms import short_or_long

REPLACEMENT = "\ufffd"

pytestmark = pytest.mark.e2e

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WITH_EVERY_BYTE = ("byte-level", "sentencepiece-bytes")


class Side:
    """A server of a tiny model with one of the tokenizers."""

    def __init__(self, kind: str, tokenizer: Any, url: str) -> None:
        self.kind, self.tokenizer, self.url = kind, tokenizer, url
        self.http = httpx.Client(base_url=url, timeout=60)

    def ids(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A choice, equal in a whole response and in a stream."""
        body = {"prompt": prompt, "temperature": 0, "add_special_tokens": False, **fields}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert CompletionResponse.model_validate(answer.json()).model_dump(exclude_unset=True) == answer.json()
        (choice,) = answer.json()["choices"]
        found: dict[str, Any] = choice
        if "prompt_logprobs" in fields:  # not in streams
            return found
        joined: defaultdict[str, list[Any]] = defaultdict(list)
        text = ""
        for event in self._events("/v1/completions", body):
            text += event["choices"][0]["text"]
            for name, values in (event["choices"][0]["logprobs"] or {}).items():
                joined[name] += values
        assert text == choice["text"]
        if choice["logprobs"] is not None:
            for name in ("tokens", "text_offset"):
                assert joined[name] == choice["logprobs"][name]
        return found

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        """A choice, equal in a whole response and in a stream."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert ChatCompletionResponse.model_validate(answer.json()).model_dump(exclude_unset=True) == answer.json()
        (choice,) = answer.json()["choices"]
        text, tokens = "", list[Any]()
        for event in self._events("/v1/chat/completions", body):
            (part,) = event["choices"]
            text += part["delta"]["content"]
            tokens += (part["logprobs"] or {"content": []})["content"]
        assert text == choice["message"]["content"]
        if choice["logprobs"] is not None:
            assert [one["token"] for one in tokens] == [one["token"] for one in choice["logprobs"]["content"]]
        found: dict[str, Any] = choice
        return found

    def _events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        lines = self.http.post(path, json={**body, "stream": True}).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture(scope="module", params=list(HARD_KINDS))
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    kind = str(request.param)
    path, tokenizer = tmp_path_factory.mktemp(kind), HARD_KINDS[kind]()
    tokenizer.chat_template = TEMPLATE
    config = FAMILIES["llama"]()
    config.vocab_size, config.max_position_embeddings = len(tokenizer) + 3, 512
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    build(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    with start_server("--model", str(path)) as server:
        yield Side(kind, tokenizer, server.url)


def bytes_of(token: str) -> bytes:
    """The bytes of a token of a completion."""
    if not token.startswith("bytes:"):
        return token.encode()
    parts = re.split(r"\\x([0-9a-f]{2})", token.removeprefix("bytes:"))
    return b"".join(bytes.fromhex(part) if index % 2 else part.encode() for index, part in enumerate(parts))


def check_places(choice: dict[str, Any]) -> None:
    """Each token begins in the text where its bytes do, and no value is lost."""
    text, found = choice["text"], choice["logprobs"]
    joined = b"".join(map(bytes_of, found["tokens"]))
    assert joined.decode("utf-8", "ignore") == text.rstrip(REPLACEMENT)  # it may end within a character
    assert not any(REPLACEMENT in token for token in found["tokens"])
    place = 0
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        begun = joined[: place + 1].decode("utf-8", "ignore")
        is_whole = len(joined[:place].decode("utf-8", "ignore")) < len(begun)
        assert offset == len(begun) - is_whole
        place += len(bytes_of(token))
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert (top is None) == (value is None)
        assert top is None or top[token] == value


# ------------------------------------------------------------------------------------------------- completions


def test_echoed_text_is_right_for_a_prompt_cut_at_any_token(side: Side) -> None:
    token_ids = side.ids(HARD_TEXT)
    for end in range(1, len(token_ids), short_or_long(3, 1)):
        force = {"max_tokens": 1, "allowed_token_ids": [token_ids[end]], "ignore_eos": True}
        choice = side.complete(token_ids[:end], echo=True, logprobs=1, **force)
        assert choice["text"].rstrip(REPLACEMENT) == TextDecoder(side.tokenizer).prompt_text(token_ids[: end + 1])
        check_places(choice)
        alone = side.complete(token_ids[:end], **force)["text"]
        assert choice["text"].endswith(alone)
        assert side.complete(token_ids[:end], echo=True, **force)["text"] == choice["text"]


def test_stop_string_may_begin_with_the_leading_space_of_the_text(side: Side) -> None:
    the = side.ids("text The")[-1:]
    if side.kind == "byte-level":  # whose space is a token of its own
        the = side.tokenizer.convert_tokens_to_ids(["Ġthe"])
    word = side.tokenizer.decode([*side.ids("text"), *the]).removeprefix("text")
    assert word.lower() == " the"
    fields: dict[str, Any] = {"max_tokens": 3, "allowed_token_ids": the, "stop": [word]}
    for prompt in ("text", side.ids("text")):
        choice = side.complete(prompt, **fields)
        assert (choice["text"], choice["stop_reason"]) == ("", word)
        assert side.complete(prompt, **fields, include_stop_str_in_output=True, echo=True)["text"] == f"text{word}"


def test_token_offsets_stay_within_text_cut_by_a_stop_string(side: Side) -> None:
    fields: dict[str, Any] = {"max_tokens": 5, "allowed_token_ids": side.ids("ok")[-1:], "ignore_eos": True}
    whole = side.complete("text", **fields)["text"]
    choice = side.complete("text", **fields, stop=[whole[:3]], logprobs=0)
    assert choice["text"] == ""
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[-1] <= len(choice["text"])


def test_tokens_without_text_do_not_shift_later_token_offsets(side: Side) -> None:
    bos, eos = side.tokenizer.bos_token_id, side.tokenizer.eos_token_id
    fields = {"max_tokens": 2, "allowed_token_ids": [eos], "logprobs": 1, "echo": True}
    for prompt, names in (("The text", 0), ([bos, *side.ids("The text")], 1)):
        choice = side.complete(prompt, ignore_eos=True, **fields)
        assert choice["logprobs"]["tokens"][-2:] == ["</s>", "</s>"]
        assert choice["logprobs"]["text_offset"][-2:] == [len(choice["text"])] * 2
        assert (
            "".join(choice["logprobs"]["tokens"][:-2])
            == choice["text"]
            == side.tokenizer.decode(prompt if names else side.ids("The text"))
        )
    shown = side.complete("The text", ignore_eos=True, skip_special_tokens=False, **fields)
    check_places(shown)
    assert shown["text"].endswith("</s>")


def test_each_token_in_top_logprobs_has_its_own_key(side: Side) -> None:
    """Tokens without text, and a byte and its character, would share a key."""
    choice = side.complete("The text", max_tokens=1, logprobs=20)
    (sampled,), (top,) = choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]
    assert len(top) in (20, 21) and top[sampled] == choice["logprobs"]["token_logprobs"][0]


# -------------------------------------------------------------------------------------------- structured output


@pytest.mark.parametrize("text", [" The end", "naïve 😀x", "é", " 日本 "])
def test_text_is_exactly_the_grammar_match(side: Side, text: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "structured_outputs": {"choice": [text]}}
    refused = side.http.post("/v1/completions", json={"prompt": "The text", **fields})
    if refused.status_code == 400:  # its tokens cannot write this text
        assert side.kind not in WITH_EVERY_BYTE and text != " The end"
        assert "tokens of a text it allows no token of this model" in refused.json()["error"]["message"]
        return
    for prompt in ("The text", [side.tokenizer.bos_token_id], side.ids("日本")[:1]):
        assert side.complete(prompt, **fields)["text"] == text
        assert side.complete(prompt, **{**fields, "structured_outputs": {"regex": text}})["text"] == text
    choice = side.complete("The text", **fields, echo=True, logprobs=1)
    assert choice["text"] == f"The text{text}"
    hidden = choice["logprobs"]["tokens"].index("</s>") if "</s>" in choice["logprobs"]["tokens"] else None
    shown = {name: values[:hidden] for name, values in choice["logprobs"].items()}
    check_places({**choice, "logprobs": shown})
    answer = side.chat("The text", **fields, logprobs=True, top_logprobs=5)
    assert answer["message"]["content"] == text
    tokens = answer["logprobs"]["content"]
    assert bytes(byte for one in tokens for byte in one["bytes"] or ()).decode() == text
    assert not any(REPLACEMENT in top["token"] for one in tokens for top in one["top_logprobs"])


# -------------------------------------------------------------------------------------------------------- chat


def test_continued_message_keeps_the_space_before_the_next_word(side: Side) -> None:
    token_ids = side.ids("text The")[-1:]
    fields: dict[str, Any] = {"max_tokens": 1, "allowed_token_ids": token_ids, "continue_final_message": True}
    answer = side.chat("text", **fields, add_generation_prompt=False, echo=True)
    assert answer["message"]["content"] == side.tokenizer.decode([*side.ids("text"), *token_ids])


def test_end_token_in_chat_logprobs_has_no_bytes(side: Side) -> None:
    eos = side.tokenizer.eos_token_id
    (one,) = side.chat("The text", max_tokens=3, allowed_token_ids=[eos], logprobs=True)["logprobs"]["content"]
    assert (one["token"], one["bytes"]) == ("</s>", None)


def test_hidden_stop_token_in_chat_logprobs_has_no_bytes(side: Side) -> None:
    (token_id,) = side.ids("ok")[-1:]
    fields: dict[str, Any] = {"max_tokens": 3, "allowed_token_ids": [token_id], "stop_token_ids": [token_id]}
    choice = side.chat("The text", **fields, logprobs=True)
    assert choice["message"]["content"] == "" and choice["logprobs"]["content"][0]["bytes"] is None
    shown = side.chat("The text", **fields, logprobs=True, include_stop_str_in_output=True)
    assert bytes(shown["logprobs"]["content"][0]["bytes"]).decode() == shown["message"]["content"]


# -------------------------------------------------------------------------------------------- of a prompt's tokens


def test_prompt_logprobs_show_only_whole_characters(side: Side) -> None:
    token_ids = side.ids(HARD_TEXT)
    entries = side.complete(token_ids, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
    own = zip(token_ids[1:], entries[1:], strict=True)
    added = "".join(entry[str(token_id)]["decoded_token"] for token_id, entry in own)
    text = side.tokenizer.decode(token_ids)
    assert added and text.endswith(added)


# --------------------------------------------------------------------------------------------- the official client


def test_official_client_reads_log_probabilities_of_partial_characters(side: Side) -> None:
    openai = pytest.importorskip("openai")
    token_ids = side.ids(HARD_TEXT)
    with openai.OpenAI(base_url=f"{side.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        (model,) = client.models.list()
        extra = {"allowed_token_ids": token_ids[-1:], "ignore_eos": True}
        (choice,) = client.completions.create(
            model=model.id, prompt=token_ids[:-1], max_tokens=1, echo=True, logprobs=2, extra_body=extra
        ).choices
        check_places(choice.model_dump())
        # sampled bytes need not be characters, and a tokenizer replaces the whole run that holds a wrong one
        whole = [one for one in token_ids if REPLACEMENT not in side.tokenizer.decode([one])]
        stream = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "The text"}], max_tokens=6, logprobs=True,
            top_logprobs=3, stream=True, extra_body={"allowed_token_ids": whole, "ignore_eos": True},
        )  # fmt: skip
        chunks = list(stream)
        tokens = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        joined = b"".join(bytes(one.bytes) for one in tokens)
        assert joined.decode() == text
