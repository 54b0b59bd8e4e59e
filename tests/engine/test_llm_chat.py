"""LLM.chat: conversations become prompts through the tokenizer's chat template."""

from __future__ import annotations

import pytest

from pointsman.engine import LLM, RequestOutputKind, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from tests.engine.text_tokenizers import byte_level
from tests.engine.tiny_models import FAMILIES, build

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots here') }}{% endif %}"
    "{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if shout %}!{% endif %}{% if add_generation_prompt %}a:{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def llm_with(template: str | None, *, has_tokenizer: bool = True) -> LLM:
    tokenizer = byte_level() if has_tokenizer else None
    if tokenizer is not None:
        tokenizer.chat_template = template
        tokenizer.add_bos_token = True  # a template writes BOS itself, so chat must not add another
    loaded: LoadedModel = wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=tokenizer)
    return LLM(loaded, num_blocks=64, block_size=4)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return llm_with(TEMPLATE)


def test_chat_accepts_one_conversation_or_a_list(llm: LLM) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "ok"}]
    one = llm.chat(HELLO, GREEDY, use_tqdm=False)
    many = llm.chat([HELLO, talk], GREEDY, use_tqdm=False)
    assert [output.prompt for output in one] == ["u:hi;a:"]
    assert [output.prompt for output in many] == ["u:hi;a:", "u:hi;a:yes;u:ok;a:"]
    assert one[0].token_ids == many[0].token_ids
    assert one[0].prompt_token_ids == llm.get_tokenizer()("u:hi;a:", add_special_tokens=False)["input_ids"]
    assert all(output.finished and len(output.token_ids) == 4 for output in many)
    same = llm.generate({"prompt_token_ids": one[0].prompt_token_ids}, GREEDY, use_tqdm=False)[0]
    assert same.token_ids == one[0].token_ids and same.prompt is None
    assert llm.chat([], GREEDY, use_tqdm=False) == []


def test_chat_options_reach_the_chat_template(llm: LLM) -> None:
    def prompt(**options: object) -> str | None:
        return llm.chat(HELLO, GREEDY, use_tqdm=False, **options)[0].prompt  # type: ignore[arg-type]

    assert prompt(add_generation_prompt=False) == "u:hi;"
    assert prompt(chat_template_kwargs={"shout": True}) == "u:hi;!a:"
    assert prompt(tools=[{"type": "function", "function": {"name": "f"}}]) == "u:hi;1a:"
    assert prompt(chat_template="{{ messages[0].content }}") == "hi"
    assert prompt(add_generation_prompt=False, continue_final_message=True) == "u:hi"


def test_invalid_conversations_are_refused_and_nothing_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="conversation 1: the chat template failed: no robots here"):
        llm.chat([HELLO, [{"role": "robot", "content": "x"}]], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="conversation 0: the chat template failed"):
        llm.chat(["not a message"], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="tokenizer has no chat template; give chat_template, or use generate"):
        llm_with(None).chat(HELLO)
    with pytest.raises(ValueError, match="has no tokenizer, so no chat template; use generate"):
        llm_with(None, has_tokenizer=False).chat(HELLO)
    assert not llm.engine.has_unfinished_requests()


def test_llm_returns_whole_outputs_for_every_output_kind(llm: LLM) -> None:
    kinds = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_kind=kind) for kind in RequestOutputKind
    ]
    outputs = llm.generate([{"prompt_token_ids": [70, 71]}] * 3, kinds, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [4, 4, 4]
    assert len({output.text for output in outputs}) == 1
