"""Tokenizing without a model, and chat templates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pointsman.engine.errors import ModelLoadError
from pointsman.engine.text.tokenizer import (
    DEMO_MODEL,
    PLAIN_CHAT_TEMPLATE,
    encode,
    model_directory,
    read_tokenizer,
    render_chat,
)


def test_model_directory_is_the_path_or_the_demo_model(tmp_path: Path) -> None:
    assert model_directory(None) == model_directory("demo") == DEMO_MODEL
    assert model_directory(str(tmp_path)) == tmp_path


def test_a_missing_tokenizer_is_none_and_a_broken_one_an_error(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="the tokenizer cannot be loaded"):
        read_tokenizer(tmp_path)


def test_the_plain_template_has_a_line_per_message() -> None:
    tokenizer = read_tokenizer(DEMO_MODEL)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    options = {"chat_template": PLAIN_CHAT_TEMPLATE, "add_generation_prompt": True}
    text = render_chat(tokenizer, messages, options)
    assert text == "system: Be brief.\nuser: Hi\nassistant:"
    assert render_chat(tokenizer, messages, {**options, "add_generation_prompt": False}).endswith("user: Hi\n")


def test_unreadable_text_is_an_error_in_one_line() -> None:
    tokenizer = read_tokenizer(DEMO_MODEL)
    assert encode(tokenizer, "a b", add_special_tokens=False)
    with pytest.raises(ValueError, match="a lone surrogate"):
        encode(tokenizer, "\udc00")


def test_a_template_cannot_reach_beyond_the_conversation() -> None:
    """Templates run in a sandbox without access to Python's internals."""
    tokenizer = read_tokenizer(DEMO_MODEL)
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="the chat template failed"):
        render_chat(tokenizer, [{"role": "user", "content": "x"}], {"chat_template": template})


def test_tokenizing_loads_no_pytorch() -> None:
    """An API process holds a tokenizer and no model."""
    loaded = "{'torch', 'numba'} & sys.modules.keys()"
    code = f"import sys, pointsman.server.serve, pointsman.server.api.app; assert not {loaded}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
