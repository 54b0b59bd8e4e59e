"""The exceptions of the engine, beside the scheduler's own. Each message is one line: value, limit, remedy."""

from __future__ import annotations

from pointsman.core.errors import PointsmanError

NOTHING_LEFT = (
    "allowed_token_ids, bad_words, min_tokens and structured_outputs together leave no token to sample; loosen one"
)
"""The `finish_detail` of a request whose own parameters forbid every token."""
GRAMMAR_TOO_SLOW = "the grammar took"
"""How the `finish_detail` of a request begins if its grammar costs too much."""
NO_COMPILER = "grammars cannot be compiled now: "
"""How every message of a `GrammarUnavailableError` begins."""
TOO_MANY_GRAMMARS = "too many grammars"
"""How every message of a `GrammarQueueFullError` begins."""


class ModelLoadError(PointsmanError, ValueError):
    """A model directory that cannot be read: absent, incomplete or corrupt."""


class UnsupportedModel(ModelLoadError):
    """A model that could be read but that the paged attention path would not compute correctly."""


class EngineStepError(PointsmanError, RuntimeError):
    """A step failed on the host. The scheduler is as it was before the step, so the engine may step again."""


class EngineDeadError(PointsmanError, RuntimeError):
    """The engine's thread has stopped, because a step failed for good or because it was shut down.

    Its `__cause__` is the failure, or None after a shutdown.
    """


class EngineStalledError(PointsmanError, RuntimeError):
    """The engine's process is alive, but does not read its messages or gives no sign of life."""


class GrammarError(PointsmanError, ValueError):
    """A grammar that cannot be compiled or used: malformed, beyond a limit, or not for this model. Only the requests
    that use it fail."""


class GrammarQueueFullError(GrammarError):
    """Too many other grammars wait to be compiled. The same request may succeed later."""


class GrammarUnavailableError(GrammarError):
    """The process that compiles grammars does not answer or cannot be started, even after a restart. The same request
    may succeed later."""


def row_failure(error: BaseException) -> str:
    """The `finish_detail` of a request whose sampling raised `error`."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f"its sampling failed: {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, at most 200 characters.

    A line that ends with a colon or a comma is joined with the next one.
    """
    text = ""
    for line in map(str.strip, str(error).splitlines()):
        text = f"{text} {line}".strip()
        if text and not text.endswith((":", ",")):
            break
    return (text.rstrip(":, ") or type(error).__name__)[:200]
