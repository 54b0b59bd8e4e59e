"""The OpenAI-compatible server: an API process in front of an engine process.

    serve.py            the API process from start to exit: engine, HTTP, signals, drain; requests bypass this file
    api/                the routes
    service/            a request in the API process: on its way to the engine and back
    metrics/            metrics, and the text of a scrape
    wire/               formats on sockets: HTTP, JSON, events, the messages of the two processes
    engine_process.py   the engine process: model, scheduler, sampler and text, behind a socket
    outbox.py           writes the engine process's outputs to that socket

Tokenizing, chat templates, HTTP and JSON happen in the API process, so none of them delays a step. If the engine
process dies, the API process still reports that to every client. Each package imports only the packages below it.
Several engines: `service/fleet.py`; on other machines: `service/remote.py`.

A request's way to the engine: begin with `service/service.py`. A token's way to the client, hop by hop:

    engine process, thread of the engine (`engine/aio/engine_thread.py` connects these parts)
        engine/model/runner.py          `ModelRunner.run`: forward pass and sample
        engine/step_loop.py             `StepLoop._update`: `Scheduler.update` appends the token; with two steps in
                                        flight this happens while the next step computes
        engine/outputs/processor.py     `OutputProcessor.process`: the token's text, in a `RequestOutput` of all tokens
        engine/aio/output_router.py     `OutputRouter.deliver`: to the mailbox of the request, and one `ring` per step
        outbox.py                       `RemotePort.ring`: `RequestOutput.since` gives the new tokens of each mailbox;
                                        all of them leave as one frame on the socket
    API process, event loop
        service/receiver.py             `Receiver.data_received`: the frame to the `ClientStream` of each request
        service/response_sender.py      `send_now`, in the same call, if the request's task waits and the connection
                                        can be written; otherwise the task itself (`ResponseSender.send_events`)
        wire/answers.py                 the bytes of the event
        wire/http.py                    `write_now` writes to the connection. If it is full, the task sends through
                                        ASGI instead (`EventStream.write` in `wire/sse.py`)

While the socket is full, tokens wait in the mailboxes and merge there. `pointsman-writer`, a thread of the engine
process, writes the remaining bytes of a frame.
"""
