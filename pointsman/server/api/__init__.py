"""The HTTP interface: the routes, one file a family of paths.

It imports `service`, `metrics`, `wire` and FastAPI; only `serve` imports it.
A route turns a body into what `service` is asked for, and the answer does not pass it again (`service/delivery.py`
writes it): `completions`, `chat`, `embeddings`, `tokenization`, `models`; `requests` explains why each request waits,
`operation` has the commands of an operator, `health` probes and metrics, `live` the live page.
`access` says who may call what, `bodies` what else a request passes before its route, `openapi` what the description at
/openapi.json says.
Begin with `app`, which lists the paths and puts everything together.
"""
