"""What the server measures, and how Prometheus reads it.

It imports `wire`, the engine's statistics and `prometheus_client`; the vLLM drop-in imports `table` and `readings`.
`table` defines every metric, `readings` says where in the engine's statistics a figure is found, `observations` counts
in the API process while requests run, `exposition` answers a scrape.
Begin with `table`.
"""
