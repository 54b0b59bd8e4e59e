"""The course: lessons about a scheduler's decisions, each with films of the real scheduler.

A lesson is a module with a `LESSON` (a class of `lesson.py`), named after its subject. The build runs the variants of
each lesson on a `Stage` (`stage.py`). `build.py` has the order of the lessons, and makes the page.
"""
