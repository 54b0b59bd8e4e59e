"""Our side of `vllm_scheduler.py`: our scheduler in place of vLLM's own, in vLLM's environment."""

from __future__ import annotations

from _scheduler_worker import serve
from _vllm_worker import VllmSession

from pointsman.integrations.vllm import Scheduler


class DropInSession(VllmSession):
    """vLLM's requests in, its outputs out, and our scheduler between them."""

    scheduler_class = Scheduler


if __name__ == "__main__":
    serve(DropInSession)
