"""Formats on sockets: HTTP and JSON between client and server, messages between API process and engine process.

It imports the values of `pointsman.core` and of `pointsman.engine`, nothing else of the server, and never PyTorch.
`protocol` has the fields of requests, `responses` those of responses, `errors` those of errors. `answers` writes the
bytes of responses, and `sse` sends them. `messages` is the protocol of the two processes, `http` the limits of a
connection. Begin with `protocol` and `messages`.
"""
