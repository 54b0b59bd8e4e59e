"""Reports of a simulation: figures with intervals, as a table, JSON, a page, and a trace.

`summary.py` computes the figures, with `intervals.py` (percentiles, bootstrap) and `course.py` (load over time);
`layout.py` determines the shown figures, their order and their units; `table.py` and `page.py` show the figures,
`chart.py` has the parts of charts; `perfetto.py` writes a trace. Begin with `summary.py`.
"""

from pointsman.sim.report.intervals import Distribution, Estimate
from pointsman.sim.report.summary import Report, combine, figures

__all__ = ["Distribution", "Estimate", "Report", "combine", "figures"]
