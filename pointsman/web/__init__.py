"""Views for people: films of a scheduler, and the pages, plots and texts made from them.

Begin with `film.py`, which reads a film and reconstructs the state at any step; `core/observe/film.py` writes one.
Nothing here decides: it shows what the scheduler decided. It may import the core and the simulator.
"""
