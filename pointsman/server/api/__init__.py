"""The HTTP interface: the routes, one file a family of paths.

It imports `service`, `metrics`, `wire` and FastAPI; only `serve` imports it. A route turns a body into a job for
`service`. The response does not pass through the route again: `service/response_sender.py` writes it. The routes:
`completions`, `chat`, `embeddings`, `tokenization`, `models`; `requests` explains why each request waits, `operation`
has the commands of an operator, `health` probes and metrics, `live` the live page. `access` checks keys and addresses,
`bodies` limits and parses bodies before the route, `openapi` writes the description at /openapi.json. Begin with `app`,
which lists the paths and assembles the app.
"""
