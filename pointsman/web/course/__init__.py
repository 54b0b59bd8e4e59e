"""The course: lessons on what a scheduler does, each with films of the real one.

A lesson is a module with a `LESSON` (`lesson.py` says what that is), named after what it is about. When the course is
built, it runs its variants on a `Stage` (`stage.py`). `build.py` has the order of the lessons, and makes the page.
"""
