"""The engine's exceptions, in addition to those in `pointsman.core.errors`. Each message is one line: value, limit,
remedy."""

from __future__ import annotations

from pointsman.core.errors import PointsmanError

NOTHING_LEFT = (
    "allowed_token_ids, bad_words, min_tokens and structured_outputs together leave no token to sample; loosen one"
)
"""The `finish_detail` of a request whose own parameters forbid every token."""
GRAMMAR_TOO_SLOW = "the grammar took"
"""Beginning of the `finish_detail` of a request whose grammar takes too much processor time."""
NO_COMPILER = "grammars cannot be compiled now: "
"""Beginning of every message of a `GrammarUnavailableError`."""
TOO_MANY_GRAMMARS = "too many grammars"
"""Beginning of every message of a `GrammarQueueFullError`."""


class ModelLoadError(PointsmanError, ValueError):
    """A model directory or GGUF file cannot be read, because it is absent, incomplete or corrupt."""


class UnsupportedModel(ModelLoadError):
    """A model can be read, but the engine's paged attention would not compute it correctly."""


class EngineStepError(PointsmanError, RuntimeError):
    """A step failed. The scheduler is in its state before the step, so the engine may step again."""


class EngineDeadError(PointsmanError, RuntimeError):
    """The engine's thread has stopped, because an error ended it or because it was shut down.

    The `__cause__` of this error is the failure, or None after a shutdown.
    """


class EngineStalledError(PointsmanError, RuntimeError):
    """The engine's process is alive, but does not read its messages, or has reported no progress within a step for too
    long."""


class GrammarError(PointsmanError, ValueError):
    """A grammar cannot be compiled or used: it is malformed, exceeds a limit, or does not suit the model. Only the
    requests that use the grammar fail."""


class GrammarQueueFullError(GrammarError):
    """Too many grammars wait to be compiled. The refused request may succeed later."""


class GrammarUnavailableError(GrammarError):
    """The process that compiles grammars does not answer or cannot be started, even after a restart. A failed request
    may succeed later."""


def failure_detail(error: BaseException) -> str:
    """The `finish_detail` of a request whose sampling raised `error`."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f"its sampling failed: {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first informative line of an error's message, at most 200 characters.

    A line that ends with a colon or a comma is joined with the next one.
    """
    text = ""
    for line in map(str.strip, str(error).splitlines()):
        text = f"{text} {line}".strip()
        if text and not text.endswith((":", ",")):
            break
    return (text.rstrip(":, ") or type(error).__name__)[:200]
