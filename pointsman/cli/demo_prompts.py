"""The built-in prompts: Python documentation to continue, on which the demo model was trained.

Prompts and outputs are of very different lengths, because requests of one length show little of what a scheduler does.
The last four begin with the same passage, which the prefix cache computes once.
"""

from __future__ import annotations

_PASSAGE = """\
The "with" statement is used to wrap the execution of a block with methods defined by a context manager. This allows \
common "try"..."except"..."finally" usage patterns to be encapsulated for convenient reuse.

A context manager is an object that defines the runtime context to be established when executing a "with" statement. \
The context manager handles the entry into, and the exit from, the desired runtime context for the execution of the \
block of code. Typical uses of context managers include saving and restoring various kinds of global state, locking \
and unlocking resources, closing opened files, etc.

"""

_LOOPS = """\
The "for" statement is used to iterate over the elements of a sequence (such as a string, tuple or list) or other \
iterable object. The expression list is evaluated once; it should yield an iterable object. An iterator is created \
for that iterable. The first item provided by the iterator is then assigned to the target list using the standard \
rules for assignments, and the suite is executed. This repeats for each item provided by the iterator. When the items \
are exhausted, the suite in the "else" clause, if present, is executed, and the loop terminates."""

DEMO_PROMPTS: tuple[tuple[str, int], ...] = (
    ("The import statement", 160),
    ("Return True if", 24),
    ("A list comprehension", 64),
    ("Raised when an operation", 48),
    (_LOOPS + '\n\nA "break" statement', 96),
    ("def __init__(self, name):\n", 40),
    ("Class definitions", 240),
    ("Return the", 12),
    ("Dictionaries are", 80),
    ("If the argument is omitted, the", 32),
    (_LOOPS, 20),
    ("The try statement specifies exception handlers", 128),
    (_PASSAGE + "A file object", 48),
    (_PASSAGE + "The method __enter__", 72),
    (_PASSAGE + "If an exception was raised", 56),
    (_PASSAGE + "Changed in version", 16),
)
"""(prompt, max_tokens), in order of arrival."""
