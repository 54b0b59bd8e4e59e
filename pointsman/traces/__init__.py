"""Readers of request traces: arrival times, prompt lengths and output lengths; and of what a server measured.

A published trace has no text, but enough to load a scheduler as the traced service was loaded: arrival times, prompt
and output lengths, and in some formats which prompts share a prefix. `read_trace` recognises the format by the
beginning of the file:

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

Lines with hash ids may have a `retention` too, seconds after its end for which a request's prefix is worth keeping.

A recording is of Pointsman's own scheduler, or of vLLM's own as `pointsman.integrations.vllm.Observer` wrote it; of
that, `read_observed` reads the steps too.

Every format has the same rules for odd rows. Left out and counted (`Trace.left_out`) are rows that hold no request: no
prompt tokens, or never sent. A request without output tokens failed; `served` leaves it out. A value that cannot be is
an error with its line: a field that is missing, a number that is negative, no number, no whole number of tokens, or
beyond 2**31 - 1 tokens. Blank lines and a byte-order mark are nothing.

`read_measurements` reads the last four with the times that were measured. Begin with `read.py`; `requests.py` says what
comes out, and each format family has its file. May import `pointsman.core`; needs NumPy and the standard library.

A hash id stands for the content of its block and of everything before it. `prompt_token_ids` turns ids into tokens:
equal ids at the same place become equal tokens, so a prefix cache has the same hits.
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
from pointsman.traces.tokens import prompt_token_ids

__all__ = [
    "MAX_HASH_ID",
    "MAX_TOKENS",
    "MOONCAKE_BLOCK_SIZE",
    "QWEN_BLOCK_SIZE",
    "LeftOut",
    "MeasuredRequest",
    "Observed",
    "ObservedRequest",
    "Trace",
    "TraceError",
    "TraceRequest",
    "about_left_out",
    "prompt_token_ids",
    "read_measurements",
    "read_observed",
    "read_trace",
    "served",
]
