"""The course: lessons about a scheduler's decisions, each with films of the real scheduler.

Each lesson is a module, named after the lesson's subject, with a variable `LESSON` (a `Lesson` of `lesson.py`). The
build runs the variants of each lesson on a `Stage` (`stage.py`). `build.py` lists the lessons in order, and makes the
course's HTML page.
"""
