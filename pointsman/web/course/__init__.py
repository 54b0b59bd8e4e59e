"""The course: lessons on what a scheduler does, each with films of the real one.

A lesson is a module with a `LESSON` (`lesson.py` says what that is). When the course is built, it runs its variants on
a `Stage` (`stage.py`). `build.py` makes the page.

    lesson                                                  module
    why batches wait                                        batching.py
    four states, and what else a request waits for          states.py
    the order of a step                                     step_order.py
    tokens, not requests: the budget                        budget.py
    chunked prefill                                         chunked_prefill.py
    blocks, and when a request needs another                blocks.py
    prefix sharing                                          prefix_sharing.py
    preemption                                              preemption.py
    thrash, the watermark, and four responses               thrash.py
    priority and starvation                                 priority.py
    speculation                                             speculation.py
    three myths                                             myths.py
    reading explain                                         explaining.py
"""
