"""The way of a request in the API process, between its route and the engine process.

It imports `metrics`, `wire` and the server's `config`; of the engine only values and the tokenizer, never PyTorch. On
the way down: `service`, `gate`, `backlog`, `prompts`, `sampling`, `engine_client`. On the way up: `receiver`,
`response_sender`. Begin with `service`: it runs the steps in order.
"""
