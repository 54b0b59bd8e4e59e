"""What did a simulation find? Figures with intervals, as a table, JSON, a page, and a trace.

`summary.py` computes the figures, with `intervals.py` (percentiles, bootstrap) and `course.py` (load over time);
`layout.py` says which are shown, in which order and unit; `table.py` and `page.py` show them, `chart.py` has the parts
of charts; `perfetto.py` writes a trace. Begin with `summary.py`.
"""

from pointsman.sim.report.intervals import Distribution, Estimate
from pointsman.sim.report.summary import Report, combine, figures

__all__ = ["Distribution", "Estimate", "Report", "combine", "figures"]
