"""What crosses a socket: HTTP and JSON between client and server, messages between API process and engine process.

It imports the values of `pointsman.core` and of `pointsman.engine`, nothing else of the server, and never PyTorch.
`protocol` lists what clients send, `responses` what they get, `errors` how they are refused; `answers` makes the bytes,
and `sse` sends them.
`messages` is the protocol of the two processes, `http` the limits of a connection.
Begin with `protocol` and `messages`.
"""
