"""What counts as a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.server.errors import ApiError
from pointsman.server.prompts import count_prompts


@pytest.mark.parametrize(
    ("prompt", "number"), [("a", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2], [3]], 3), (["a"] * 1024, 1024)]
)
def test_prompts_are_counted_before_they_are_read(prompt: Any, number: int) -> None:
    assert count_prompts(prompt) == number


def test_too_many_are_refused() -> None:
    with pytest.raises(ApiError, match="1025") as caught:
        count_prompts(["a"] * 1025)
    assert caught.value.status_code == 400 and caught.value.param == "prompt"
