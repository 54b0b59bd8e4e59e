"""The text after a prompt is the text that the tokens add to it, wherever the prompt ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import normalizers

from pointsman.core import Request
from pointsman.engine.outputs.request_output import RequestOutput, Transcript
from pointsman.engine.text.detokenizer import Detokenizer, TextDecoder
from tests.engine.text_tokenizers import (
    HARD_KINDS,
    HARD_TEXT,
    KINDS,
    PickyTokenizer,
    byte_fallback,
    byte_level,
    byte_token,
    metaspace,
    random_tokens,
    sentencepiece,
    wordpiece,
)
from tests.forms import short_or_long

NUM_STRINGS = short_or_long(300, 10_000)  # per kind of tokenizer
REPLACEMENT = "\ufffd"


def pieces_behind(decoder: TextDecoder, prompt: list[int], token_ids: list[int]) -> list[str]:
    """The text that a stream releases for each token after a prompt, and the text that `flush` returns at the end."""
    stream = decoder.stream()
    stream.continue_prompt(prompt)
    whole = stream.decode_rest(token_ids)
    pieces = [*(stream.feed(token_id) for token_id in token_ids), stream.flush()]
    assert "".join(pieces) == whole
    return pieces


def text_behind(decoder: TextDecoder, prompt: list[int], token_ids: list[int]) -> str:
    return "".join(pieces_behind(decoder, prompt, token_ids))


def tokens_of(tokenizer: Any, *tokens: str) -> list[int]:
    token_ids: list[int] = tokenizer.convert_tokens_to_ids(list(tokens))
    assert None not in token_ids
    return token_ids


# ------------------------------------------------------------------------------------- every split of a text


@pytest.mark.parametrize("kind", list(HARD_KINDS))
def test_prompt_and_output_join_to_the_text_at_every_split(kind: str) -> None:
    tokenizer = HARD_KINDS[kind]()
    decoder = TextDecoder(tokenizer)
    token_ids = tokenizer(HARD_TEXT, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(token_ids)
    assert whole == (" ".join(HARD_TEXT.split()) if kind == "wordpiece" else HARD_TEXT)
    for split in range(len(token_ids) + 1):
        prompt, output = token_ids[:split], token_ids[split:]
        before, behind = decoder.prompt_text(prompt), text_behind(decoder, prompt, output)
        assert before + behind == whole
        assert REPLACEMENT not in before + behind


@pytest.mark.parametrize("kind", list(HARD_KINDS))
def test_special_tokens_in_a_prompt_change_nothing(kind: str) -> None:
    """Special tokens around a prompt's text do not change the output's text; after special tokens alone, the output is
    the beginning of a text."""
    tokenizer = HARD_KINDS[kind]()
    decoder = TextDecoder(tokenizer)
    token_ids = tokenizer("The text", add_special_tokens=False)["input_ids"]
    bos, eos = tokens_of(tokenizer, "<s>", "</s>")
    for split in range(len(token_ids) + 1):
        prompt, output = token_ids[:split], token_ids[split:]
        expected = text_behind(decoder, prompt, output)
        for marked in ([bos, *prompt], [bos, *prompt, eos], [*prompt, eos, bos]):
            assert text_behind(decoder, marked, output) == expected
    assert text_behind(decoder, [bos], token_ids) == "The text"


# ---------------------------------------------------------------------------------------- random tokens


@pytest.mark.parametrize("kind", list(KINDS))
def test_random_outputs_continue_random_prompts(kind: str) -> None:
    tokenizer, rng = KINDS[kind](), random.Random(kind)
    decoder, special = TextDecoder(tokenizer), set(tokenizer.all_special_ids)
    num_compared = 0
    for _ in range(NUM_STRINGS // 4 if kind.startswith("python") else NUM_STRINGS):
        prompt = [token_id for token_id in random_tokens(kind, tokenizer, rng) if token_id not in special]
        output = random_tokens(kind, tokenizer, rng)
        before = decoder.prompt_text(prompt)
        whole = tokenizer.decode([*prompt, *output], skip_special_tokens=True)
        text = text_behind(decoder, prompt, output)
        last = tokenizer.convert_ids_to_tokens(prompt[-1:]) if kind == "byte-fallback" else []
        run_crosses = REPLACEMENT in whole and any(one is None or one.startswith("<0x") for one in last)
        if whole.startswith(before) and not run_crosses:
            num_compared += 1
            assert before + text == whole, (prompt, output)
        else:  # the text of invalid bytes and of spaces that are cleaned up changes with what follows
            assert kind in ("byte-fallback", "wordpiece-transformers-cleanup")
    assert num_compared > NUM_STRINGS / 8


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_requests_text_continues_the_text_of_its_prompt(kind: str, is_eager: bool) -> None:
    tokenizer, rng = KINDS[kind](), random.Random(kind)
    decoder = TextDecoder(tokenizer)
    for _ in range(50):
        prompt, token_ids = random_tokens(kind, tokenizer, rng) or [1], random_tokens(kind, tokenizer, rng)
        transcript = Transcript(
            Request("r", prompt, arrival_time=0.0, max_tokens=99), decoder=decoder,
            detokenizer=Detokenizer(decoder.stream()), is_eager=is_eager,
        )  # fmt: skip
        outputs = []
        for token_id in token_ids:
            transcript.token_ids.append(token_id)
            if is_eager:
                transcript.make_text(len(transcript.token_ids))
            outputs.append(RequestOutput(transcript, len(transcript.token_ids) - 1, len(transcript.token_ids)))
        if is_eager:
            transcript.make_remaining_text()
        transcript.finish("stop", "", None)
        outputs.append(RequestOutput(transcript, len(token_ids), len(token_ids), finished=True))
        whole = RequestOutput(transcript, 0, len(token_ids), finished=True)
        expected = text_behind(decoder, prompt, token_ids)
        parts = [*outputs, whole] if rng.random() < 0.5 else [whole, *outputs]
        texts = {id(one): one.text for one in parts}
        assert "".join(texts[id(one)] for one in outputs) == texts[id(whole)] == expected


# ----------------------------------------------------------------------------------------------- one by one


def test_the_first_word_of_an_output_keeps_its_space() -> None:
    tokenizer = sentencepiece(falls_back=True)
    decoder = TextDecoder(tokenizer)
    prompt, the = tokenizer("text", add_special_tokens=False)["input_ids"], tokens_of(tokenizer, "▁The")
    assert pieces_behind(decoder, prompt, the) == [" The", ""]
    assert pieces_behind(decoder, tokens_of(tokenizer, "<s>"), the) == ["The", ""]
    detokenizer = Detokenizer(decoder.stream(), [" The"])
    detokenizer.continue_prompt(prompt)
    assert (detokenizer.feed(the[0]), detokenizer.stop_reason) == ("", " The")


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "python", "python-replacing"])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_output_completes_the_prompts_last_character(kind: str, num_bytes: int) -> None:
    tokenizer = KINDS[kind]()
    decoder = TextDecoder(tokenizer)
    spelled: list[Any] = [byte_token(kind, tokenizer, byte) for byte in "aé😀".encode()]
    prompt, output = spelled[: 3 + num_bytes], spelled[3 + num_bytes :]
    assert decoder.prompt_text(prompt) == "aé"
    assert text_behind(decoder, prompt, output) == "😀"
    assert text_behind(decoder, prompt, output[:-1]) in ("", REPLACEMENT, REPLACEMENT * (num_bytes + len(output) - 1))


def test_text_after_a_prompt_of_byte_tokens_keeps_its_space() -> None:
    tokenizer = sentencepiece(falls_back=True)
    decoder = TextDecoder(tokenizer)
    the = tokens_of(tokenizer, "▁The")
    assert text_behind(decoder, tokens_of(tokenizer, "<0x0A>"), the) == " The"
    assert text_behind(decoder, tokens_of(tokenizer, "<0x0A>", "▁"), the) == " The"
    assert (
        text_behind(decoder, tokens_of(tokenizer, "<s>", "<0xC3>"), tokens_of(tokenizer, "<0xA9>", "▁The")) == "é The"
    )


def test_invalid_bytes_of_a_prompt_damage_no_later_character() -> None:
    tokenizer = KINDS["byte-fallback"]()
    decoder = TextDecoder(tokenizer)
    prompt, output = tokens_of(tokenizer, "<0xFF>", "<0x41>"), tokens_of(tokenizer, "<0xC3>", "<0xA9>", "b")
    assert text_behind(decoder, prompt, output) == "éb"
    assert text_behind(decoder, output[:2], tokens_of(tokenizer, "<0xFF>", "b")) == f"{REPLACEMENT}b"


def test_a_special_token_ends_an_incomplete_character() -> None:
    for kind in ("byte-level", "byte-fallback"):
        tokenizer = KINDS[kind]()
        first, last = (byte_token(kind, tokenizer, byte) for byte in "é".encode())
        text = text_behind(TextDecoder(tokenizer), [first, *tokens_of(tokenizer, "<s>")], [last])  # type: ignore[list-item]
        assert text == REPLACEMENT


def test_a_replacement_character_in_the_prompt_is_complete() -> None:
    for kind in ("byte-level", "byte-fallback"):
        tokenizer = KINDS[kind]()
        prompt: list[Any] = [byte_token(kind, tokenizer, byte) for byte in f"a{REPLACEMENT}".encode()]
        decoder = TextDecoder(tokenizer)
        assert decoder.prompt_text(prompt) == f"a{REPLACEMENT}"
        assert text_behind(decoder, prompt, prompt[:1]) == "a"


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ("a", "'s the", "'s the"),  # " 's" loses its space, as after a generated word
        ("a '", "s", "s"),  # the prompt's own space stays
        ("do", "n't .", "n't."),
        ("a", "the", " the"),
    ],
)
def test_spaces_are_cleaned_up_after_a_prompt(prompt: str, output: str, text: str) -> None:
    tokenizer = wordpiece(cleanup=False, clean_up_tokenization_spaces=True)
    decoder = TextDecoder(tokenizer)
    assert text_behind(decoder, tokens_of(tokenizer, *prompt.split()), tokens_of(tokenizer, *output.split())) == text


def test_only_the_end_of_a_long_prompt_is_detokenized() -> None:
    """Only the last tokens of a long prompt are read, unless they have no text."""
    tokenizer = metaspace()
    calls: list[int] = []

    class Counting(PickyTokenizer):
        def decode(self, token_ids: list[int], **options: Any) -> str:
            calls.append(len(token_ids))
            return super().decode(token_ids, **options)

    stream = TextDecoder(tokenizer).stream()
    stream.continue_prompt(tokens_of(tokenizer, "") * 100_000)
    stream.continue_prompt(tokens_of(tokenizer, "b") * 100_000)
    slow = TextDecoder(Counting(tokenizer, frozenset())).stream()
    slow.continue_prompt(tokens_of(tokenizer, "b") * 100_000)
    assert sum(calls) < 100


# ------------------------------------------------------------------------------------------------ verbatim text


@pytest.mark.parametrize("kind", list(HARD_KINDS))
def test_verbatim_text_is_independent_of_the_prompt(kind: str) -> None:
    """A grammar matches the tokens' bytes: nothing is stripped at the beginning of a text."""
    tokenizer = HARD_KINDS[kind]()
    decoder = TextDecoder(tokenizer)
    token_ids = tokenizer(HARD_TEXT, add_special_tokens=False)["input_ids"]
    for split in range(len(token_ids)):
        stream = decoder.stream(is_verbatim=True)
        text = "".join([*map(stream.feed, token_ids[split:]), stream.flush()])
        assert text == b"".join(map(decoder.token_bytes, token_ids[split:])).decode("utf-8", "replace") or (
            kind == "sentencepiece-bytes" and text.startswith(REPLACEMENT)
        )


def test_verbatim_text_is_not_cleaned_up() -> None:
    tokenizer = wordpiece(cleanup=False, clean_up_tokenization_spaces=True)
    decoder = TextDecoder(tokenizer)
    token_ids = tokens_of(tokenizer, "do", "n't", ".")
    stream = decoder.stream(is_verbatim=True)
    assert stream.decode_rest(token_ids) == "".join(map(stream.feed, token_ids)) == " do n't ."


# --------------------------------------------------------------------------------------------- bytes of tokens


@pytest.mark.parametrize("kind", list(HARD_KINDS))
def test_the_bytes_of_all_tokens_join_to_the_text(kind: str) -> None:
    tokenizer = HARD_KINDS[kind]()
    decoder = TextDecoder(tokenizer)
    token_ids = tokenizer(HARD_TEXT, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(token_ids)
    behind = [decoder.first_token_bytes(token_ids[0]), *map(decoder.token_bytes, token_ids[1:])]
    assert b"".join(behind).decode() == text
    pieces = decoder.prompt_pieces([tokenizer.bos_token_id, *token_ids], text)
    assert pieces == ["<s>", *behind]
    named = tokenizer.decode([tokenizer.bos_token_id, *token_ids])
    joined = decoder.prompt_pieces([tokenizer.bos_token_id, *token_ids], named)
    assert b"".join(joined).decode() == named  # type: ignore[arg-type]  # none is missing


def test_the_first_token_of_a_text_decodes_like_a_single_token() -> None:
    for tokenizer, token, alone in (
        (metaspace(), "▁▁", b""),
        (metaspace(), "▁the", b"the"),
        (wordpiece(cleanup=False, clean_up_tokenization_spaces=False), "##b", b"##b"),
        (byte_fallback(), "▁▁", b" "),
        (byte_fallback(), "<0xC3>", b"\xc3"),
        (byte_level(), "Ġthe", b" the"),
    ):
        (token_id,) = tokens_of(tokenizer, token)
        assert TextDecoder(tokenizer).first_token_bytes(token_id) == alone


def test_logprobs_of_an_output_without_text_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ignores EOS may get only EOS tokens."""
    tokenizer = byte_level()
    decoder = TextDecoder(tokenizer)
    request = Request("a", [5], arrival_time=0.0, max_tokens=1000)
    transcript = Transcript(request, decoder=decoder, detokenizer=Detokenizer(decoder.stream()), keeps_logprobs=True)
    looked_at: list[int] = []
    is_special = decoder.is_special

    def counting(token_id: int) -> bool:
        looked_at.append(token_id)
        return is_special(token_id)

    monkeypatch.setattr(decoder, "is_special", counting)
    for index in range(1000):
        transcript.token_ids.append(tokenizer.eos_token_id)
        assert transcript.pieces(index, index + 1) == ["</s>"]
    assert len(looked_at) <= 5000


def test_a_tokenizer_may_compose_the_characters_of_a_prompt() -> None:
    tokenizer = HARD_KINDS["byte-level"]()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    text = "e\u0301e\u0301<s>a"
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = TextDecoder(tokenizer).prompt_pieces([tokenizer.eos_token_id, *token_ids], text)
    assert pieces[0] == "</s>" and b"".join(pieces[1:]).decode() == "éé<s>a"  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(HARD_KINDS))
def test_the_text_added_by_a_token_has_no_partial_character(kind: str) -> None:
    tokenizer = HARD_KINDS[kind]()
    decoder = TextDecoder(tokenizer)
    token_ids = tokenizer(HARD_TEXT, add_special_tokens=False)["input_ids"]
    added = [decoder.added_text(token_id, token_ids[:index]) for index, token_id in enumerate(token_ids)]
    assert REPLACEMENT not in "".join(added)
    assert "".join(added).lstrip(" ") == tokenizer.decode(token_ids)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    for kind in ("byte-level", "byte-fallback", "python-replacing"):
        tokenizer = KINDS[kind]()
        decoder = TextDecoder(tokenizer)
        spelled: list[Any] = [byte_token(kind, tokenizer, byte) for byte in "aé😀".encode()]
        added = [decoder.added_text(token_id, spelled[:index]) for index, token_id in enumerate(spelled)]
        assert added == ["a", "", "é", "", "", "", "😀"]
