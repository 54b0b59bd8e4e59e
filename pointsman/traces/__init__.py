"""Reads request traces (arrival times, prompt and output lengths) and the measurements of servers.

A published trace has no text. It has the data to reproduce the load of the traced service: arrival times, prompt and
output lengths, and in some formats the prompts' shared prefixes. `read_trace` recognises the format by the beginning of
the file:

    format               begins with                                  arrival        prompts that share a prefix
    Azure CSV            TIMESTAMP,ContextTokens,GeneratedTokens      date and time  unknown
    BurstGPT CSV         Timestamp,Model,Request tokens,...           seconds        unknown
    Mooncake JSON        {"timestamp": ..., "input_length": ...,      milliseconds   one hash id per 512 tokens
                          "output_length": ..., "hash_ids": [...]}
    Qwen-Bailian JSON    as Mooncake, with "chat_id"                  seconds        one hash id per 16 tokens
    measured JSON        {"request_id": ..., "input_toks": ...,       seconds        unknown
                          "output_toks": ..., "arrival_time": ...}
    vLLM bench result    {..., "endpoint_type": ..., "ttfts": [...],  seconds        unknown
                          "start_times": [...], ...}
    guidellm report      {"metadata": {"version": ..., ...}, ...}     seconds        unknown
    Pointsman recording  {"format": "pointsman-recording", ...}       seconds        one hash id per block

Lines with hash ids may also have a `retention`: seconds after a request's end for which its prefix is worth keeping.

A recording is one of Pointsman's scheduler, or one of vLLM's own scheduler, which
`pointsman.integrations.vllm.Observer` writes. From recordings of vLLM's scheduler, `read_observed` also reads the
steps.

Every format has the same rules for exceptional rows. Rows without prompt tokens, and rows that were never sent, are
left out and counted (`Trace.left_out`). A request without output tokens failed; `served` leaves it out. An impossible
value is an error that names the line: a missing field, a negative number, a value that is not a number, a fraction of a
token, or more than 2**31 - 1 tokens. Blank lines and a byte-order mark are ignored.

`read_measurements` reads the last four formats with their measured times. `read_run_summaries` reads a file of another
kind: runs of a server, each with its arrivals and the means that a client measured. Begin with `read.py`; the results
are defined in `requests.py`, and each family of formats is read by one file. This package may import `pointsman.core`;
it needs NumPy and the standard library.

A hash id identifies the content of its block and of all blocks before it. `prompt_token_ids` turns hash ids into
tokens: equal ids at the same place become equal tokens, so a prefix cache has the same hits as with the original
prompts.
"""

from pointsman.traces.observed import Observed, ObservedRequest, read_observed
from pointsman.traces.read import read_measurements, read_trace
from pointsman.traces.requests import (
    MAX_HASH_ID,
    MAX_TOKENS,
    MOONCAKE_BLOCK_SIZE,
    QWEN_BLOCK_SIZE,
    LeftOut,
    MeasuredRequest,
    Trace,
    TraceError,
    TraceRequest,
    about_left_out,
    served,
)
from pointsman.traces.run_summaries import FIGURES, RunSummary, is_run_summaries, read_run_summaries
from pointsman.traces.tokens import prompt_token_ids

__all__ = [
    "FIGURES",
    "MAX_HASH_ID",
    "MAX_TOKENS",
    "MOONCAKE_BLOCK_SIZE",
    "QWEN_BLOCK_SIZE",
    "LeftOut",
    "MeasuredRequest",
    "Observed",
    "ObservedRequest",
    "RunSummary",
    "Trace",
    "TraceError",
    "TraceRequest",
    "about_left_out",
    "is_run_summaries",
    "prompt_token_ids",
    "read_measurements",
    "read_observed",
    "read_run_summaries",
    "read_trace",
    "served",
]
