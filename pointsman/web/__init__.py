"""Views for people: films of a scheduler, and the pages, plots and texts made from them.

Begin with `film.py`, which reads a film and reconstructs the state at any step; `core/observe/film.py` writes one. The
package decides nothing: it shows the decisions of the scheduler. It may import the core and the simulator.
"""
