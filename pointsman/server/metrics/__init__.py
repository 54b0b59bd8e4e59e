"""Metrics of the server, and their exposition to Prometheus.

It imports `wire`, the engine's statistics and `prometheus_client`; the vLLM drop-in imports `table` and `readings`.
`table` defines every metric, `readings` reads values from the engine's statistics, `observations` counts in the API
process while requests run, `exposition` writes the text of a scrape. Begin with `table`.
"""
