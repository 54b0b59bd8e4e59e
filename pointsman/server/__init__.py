"""The OpenAI-compatible server: an API process in front of an engine process.

    serve.py          the API process from start to exit: engine, HTTP, signals, drain
    engine_client.py  the API process's side of the engine: a stream of deltas per request
    engine_process.py the engine process: model, scheduler, sampler and text, behind a socket
    wire.py           what crosses between the two
    app.py            the HTTP interface

Tokenizing, chat templates, HTTP and JSON happen in the API process, so none of them ever delays a step; and when the
engine process dies, of whatever, the API process is still there to tell every client.
"""
