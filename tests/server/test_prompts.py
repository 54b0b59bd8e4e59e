"""What counts as a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pointsman.engine.text.tokenizer import PLAIN_CHAT_TEMPLATE
from pointsman.server.errors import ApiError
from pointsman.server.prompts import check_chat_template, count_prompts


@pytest.mark.parametrize(
    ("prompt", "number"), [("a", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2], [3]], 3), (["a"] * 1024, 1024)]
)
def test_prompts_are_counted_before_they_are_read(prompt: Any, number: int) -> None:
    assert count_prompts(prompt) == number


def test_too_many_are_refused() -> None:
    with pytest.raises(ApiError, match="1025") as caught:
        count_prompts(["a"] * 1025)
    assert caught.value.status_code == 400 and caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (" \n", "is empty"),
        ("{% for message in messages %}\n{{ message.content }\n{% endfor %}", r"unexpected '}' \(line 2\)"),
        ("{% for message in messages %}", r"Unexpected end of template.*\(line 1\)"),
        ("{{ messages[0].content | no_such_filter }}", r"No filter named 'no_such_filter'.* \(line 1\)"),
        ("{{ messages[1].content }}", "has no element 1"),
        ("{{ raise_exception('no users here') }}", "no users here"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_told_of_in_one_line(template: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^chat_template .*({why}).* leave it out for the model's own$") as caught:
        check_chat_template(template, "demo")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        PLAIN_CHAT_TEMPLATE,
        "{{ eos_token + messages[0].content }}",  # special tokens are the tokenizer's
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ messages | tojson }}",
        "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}{{ strftime_now('%Y') }}",
    ],
)
def test_what_chat_templates_may_use_is_no_error(template: str) -> None:
    check_chat_template(template, "demo")


def test_a_chat_template_needs_a_tokenizer_to_be_tried(tmp_path: Path) -> None:
    check_chat_template("{{ messages | no_such_filter }}", tmp_path)  # prompts will be token ids in any case
