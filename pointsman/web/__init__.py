"""What a person looks at: films of a scheduler, and what is made from them.

Begin with `film.py`, which reads a film and shows the state at any step; `core/observe/film.py` writes one. Nothing
here decides: what is shown is what was decided. It may import the core and the simulator.
"""
