"""The OpenAI-compatible server: an API process in front of an engine process.

    serve.py            the API process from start to exit: engine, HTTP, signals, drain (no request passes it)
    api/                the routes
    service/            what happens to a request in the API process, down to the engine and back
    metrics/            what is measured, and the text of a scrape
    wire/               what crosses a socket: HTTP, JSON, events, the messages of the two processes
    engine_process.py   the engine process: model, scheduler, sampler and text, behind a socket
    outbox.py           how the engine process writes to that socket

Tokenizing, chat templates, HTTP and JSON happen in the API process, so none of them delays a step; and when the engine
process dies, for whatever reason, the API process still reports it to every client. Each package imports those below
it. Several engines: `service/fleet.py`; on other machines: `service/remote.py`.

A request's way to the engine: begin with `service/service.py`. A token's way to the client: `engine/model/runner.py`
(forward pass and sample) -> `engine/step_loop.py` -> `engine/outputs/processor.py` (its text) ->
`engine/aio/readers.py` -> `outbox.py` (one frame a step) -> the socket -> `service/inbox.py` -> `service/delivery.py`
-> `wire/answers.py` (the bytes of the event) -> `wire/sse.py` (one write) -> `wire/http.py` (the connection).
"""
