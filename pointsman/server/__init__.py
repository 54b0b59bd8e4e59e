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

A request's way to the engine: begin with `service/service.py`. A token's way to the client, hop by hop:

    engine process, thread of the engine (`engine/aio/engine_thread.py` connects these parts)
        engine/model/runner.py          `ModelRunner.run`: forward pass and sample
        engine/step_loop.py             `StepLoop._update`: `Scheduler.update` appends the token; with two steps in
                                        flight this happens while the next step computes
        engine/outputs/processor.py     `OutputProcessor.process`: the token's text, in a `RequestOutput` of all tokens
        engine/aio/output_router.py     `OutputRouter.deliver`: to the mailbox of the request, and one `ring` a step
        outbox.py                       `RemotePort.ring`: `RequestOutput.since` gives the new tokens of each
                                        mailbox, which leave as one frame on the socket
    API process, event loop
        service/inbox.py                `Inbox.data_received`: the frame to the `ClientStream` of each request
        service/delivery.py             `send_now`, in that call, where the reader waits and the connection has room;
                                        otherwise the request's own task (`Delivery.send_events`)
        wire/answers.py                 the bytes of the event
        wire/http.py                    `write` to the connection (`EventStream.write_now`); without room, the task
                                        sends through ASGI (`EventStream.write` in `wire/sse.py`)

What the socket does not take waits in the mailboxes, where tokens merge; `pointsman-writer`, a thread of the engine
process, writes the rest of a frame.
"""
