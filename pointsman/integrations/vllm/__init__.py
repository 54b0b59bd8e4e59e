"""The drop-in for vLLM: `vllm serve MODEL --scheduler-cls pointsman.integrations.vllm.Scheduler`.

The package translates between vLLM's scheduler interface and the core, and gives operators a control socket. It imports
`pointsman.core`, and vLLM only in modules that vLLM itself loads. Only Pointsman's command line imports the package.
Begin at `scheduler.py`, which has every method that vLLM calls. It uses `requests.py` (converts requests),
`scheduler_output.py` (converts decisions), `results.py` (converts sampled tokens, and makes the outputs for clients),
`settings.py` and `support.py` (configuration).

Operation: `operation.py` (answers the questions of operators), `control.py` (the socket), `recordings.py`,
`statistics.py` (vLLM's metrics), `kv_events.py`. `observer.py` has the other class for `--scheduler-cls`: vLLM's own
scheduler, with a recording of its actions (`observation.py`). Without a running vLLM: `client.py` (the client of the
socket), `check.py` (checks a model and its options), `interface/` (finds what another version of vLLM has changed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.integrations.vllm.observer import Observer
    from pointsman.integrations.vllm.scheduler import Scheduler

__all__ = ["Observer", "Scheduler"]


def __getattr__(name: str) -> Any:
    if name == "Scheduler":  # lazily: `scheduler.py` needs vLLM, but `check` and `client` must work without vLLM
        from pointsman.integrations.vllm.scheduler import Scheduler

        return Scheduler
    if name == "Observer":
        from pointsman.integrations.vllm.observer import Observer

        return Observer
    raise AttributeError(f"{__name__} has no {name!r}; --scheduler-cls takes {__name__}.Scheduler or .Observer")
