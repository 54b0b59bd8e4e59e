"""What the engine raises, beside the scheduler's own errors. Each message is one line: value, limit, remedy."""

from __future__ import annotations

from pointsman.core.errors import PointsmanError

NOTHING_LEFT = (
    "allowed_token_ids, bad_words, min_tokens and structured_outputs together leave no token to sample; loosen one"
)
"""Why a request finishes with an error through its own parameters."""
GRAMMAR_TOO_SLOW = "the grammar took"
"""How the same begins if its grammar costs too much."""
NO_COMPILER = "grammars cannot be compiled now: "
"""How every message of a `GrammarUnavailableError` begins."""
TOO_MANY_GRAMMARS = "too many grammars"
"""How every message of a `GrammarQueueFullError` begins."""


class ModelLoadError(PointsmanError, ValueError):
    """A model directory that cannot be read: absent, incomplete or corrupt."""


class UnsupportedModel(ModelLoadError):
    """A model that could be read but that the paged attention path would not compute correctly."""


class EngineStepError(PointsmanError, RuntimeError):
    """A step failed on the host. The scheduler has been rewound to before it; the engine may go on stepping."""


class EngineDeadError(PointsmanError, RuntimeError):
    """The engine's thread has stopped, because a step failed for good or because it was shut down.

    Its `__cause__` is the failure, or None after a shutdown.
    """


class EngineStalledError(PointsmanError, RuntimeError):
    """The engine lives, in a process of its own, and does not read what it is sent, or gives no sign of life."""


class GrammarError(PointsmanError, ValueError):
    """A grammar that cannot be compiled or used: malformed, beyond a limit, or not for this model. Only the requests
    that ask for it are concerned."""


class GrammarQueueFullError(GrammarError):
    """Nothing is wrong with the grammar, but too many others wait: an overload, which passes."""


class GrammarUnavailableError(GrammarError):
    """Nothing is wrong with the grammar, but the process that compiles grammars does not answer or cannot be started,
    although it was started again. The same request may succeed later."""


def row_failure(error: BaseException) -> str:
    """Why a request finishes with an error whose sampling raised this: the engine's own words, or the exception's."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f"its sampling failed: {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, at most 200 characters.

    A line that ends with a colon or a comma goes on in the next one.
    """
    text = ""
    for line in map(str.strip, str(error).splitlines()):
        text = f"{text} {line}".strip()
        if text and not text.endswith((":", ",")):
            break
    return (text.rstrip(":, ") or type(error).__name__)[:200]
