"""The loop around the engine: requests arrive, steps run, and the run ends cleanly in every case.

Prompts are added before anything is shown; a trace's requests are added at their arrival times. Ctrl-C takes effect
between two steps, so that the scheduler, a recording and the terminal stay consistent; a second Ctrl-C takes effect
immediately.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from pointsman.cli.display import Display
from pointsman.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, CommandError
from pointsman.cli.progress import Progress
from pointsman.cli.workload import Job, Workload
from pointsman.engine.interruption import Interruption, delayed_interrupts

if TYPE_CHECKING:
    from pointsman.engine import Engine

IDLE_SECONDS = 0.05  # seconds between checks of the clock and for Ctrl-C, while waiting for the next arrival


def run_workload(engine: Engine, workload: Workload, display: Display) -> int:
    """Run every job until it has finished.

    Returns:
        The exit code: 0; 1 if a step or a request failed; 2 if a prompt was invalid (all other prompts ran); 130 after
        Ctrl-C.

    Raises:
        CommandError: no request could run.
    """
    run = _Run(engine, workload, display)
    with delayed_interrupts() as interruption:
        run.report_problems()
        run.admit_arrived(interruption)
        run.report_refusals()
        with display:
            run.run_steps(interruption)
            run.abort_unfinished()
    summary = run.progress.summary(time.monotonic(), interrupted=interruption.requested)
    display.summary({**summary, "left_out": workload.about_left_out})
    if run.failure:
        _print_error(run.failure)
    if interruption.requested:
        return EXIT_INTERRUPTED
    if run.failure or run.progress.ends["error"]:
        return EXIT_FAILED
    return EXIT_BAD_INPUT if run.had_bad_prompt else EXIT_OK


class _Run:
    """A run: the jobs that have not arrived, and the progress of all other jobs."""

    def __init__(self, engine: Engine, workload: Workload, display: Display) -> None:
        self.engine = engine
        self.workload = workload
        self.display = display
        self.pending: deque[Job] = deque(workload.jobs)  # jobs by arrival
        self.progress = Progress(engine, time.monotonic(), len(workload.jobs) + len(workload.problems))
        self.had_bad_prompt = False
        self.failure = ""
        self._refusals: list[str] = []
        self._num_added = 0

    def report_problems(self) -> None:
        """Report the prompts of the workload that could not become jobs."""
        for problem in self.workload.problems:
            self.display.ended(self.progress.refused(problem.request_id, problem.message))
            self.had_bad_prompt = True
            _print_error(problem.message)

    def admit_arrived(self, interruption: Interruption) -> None:
        """Add the requests whose arrival time has passed."""
        elapsed = time.monotonic() - self.progress.start
        while self.pending and self.pending[0].arrival_time <= elapsed and not interruption.requested:
            self._add_job(self.pending.popleft())

    def report_refusals(self) -> None:
        """Report the refused requests so far: their number for a trace, otherwise one error each, or one error if no
        request can run.

        Raises:
            CommandError: every request was refused.
        """
        refusals, self._refusals = self._refusals, []
        if refusals and not self._num_added and not self.pending:
            raise CommandError(self._all_refused_message(refusals))
        if not self.workload.is_trace:
            for refusal in refusals:
                self.had_bad_prompt = True
                _print_error(refusal)

    def run_steps(self, interruption: Interruption) -> None:
        """Step until every request has finished, Ctrl-C was pressed or a step failed."""
        from pointsman.engine import EngineStepError
        from pointsman.engine.stats import StatsLogger

        statistics = None if self.display.shows_progress else StatsLogger(self.engine)
        while not interruption.requested and (self.pending or self.engine.has_unfinished_requests()):
            self.admit_arrived(interruption)
            if self.engine.has_unfinished_requests():
                try:
                    outputs = self.engine.step()
                except EngineStepError as error:
                    self.failure = str(error)
                    return
                for entry in self.progress.stepped(outputs, time.monotonic()):
                    self.display.ended(entry)
            elif self.pending:
                wait = self.progress.start + self.pending[0].arrival_time - time.monotonic()
                time.sleep(min(max(wait, 0.0), IDLE_SECONDS))
            self.display.refresh(self.progress, time.monotonic())
            if statistics is not None:
                statistics.tick()
        if statistics is not None:
            statistics.finish()

    def abort_unfinished(self) -> None:
        """Abort unfinished requests; after a complete run there are none."""
        for entry in self.progress.unfinished():
            if (output := self.engine.abort(entry.request_id)) is not None:
                self.display.ended(self.progress.aborted(output))

    def _all_refused_message(self, refusals: list[str]) -> str:
        """One message for all refused requests, which usually share a cause, such as a pool that is too small."""
        config = self.engine.scheduler.config
        message = refusals[0]
        if len(refusals) > 1:
            message = f"all {len(refusals)} requests were refused; the first: {message}"
        if config.num_usable_tokens < config.max_model_len:
            full = -(-config.max_model_len // config.block_size)
            message += (
                f" (a request of full length, {config.max_model_len} tokens, needs {full} blocks of "
                f"{config.block_size}; the pool has {config.num_usable_blocks})"
            )
        return message

    def _add_job(self, job: Job) -> None:
        try:
            prompt = job.prompt(self.engine.loaded.vocab_size)
            request = self.engine.add_request(
                job.request_id,
                prompt,
                job.params,
                arrival_time=self.progress.start + job.arrival_time,
                priority=job.priority,
                tenant=job.tenant,
                ttft_target=job.ttft_target,
                retention=job.retention,
            )
        except ValueError as error:  # the request is refused, or has an invalid text or token
            self._refusals.append(f"{job.place}: {error}")
            self.display.ended(self.progress.refused(job.request_id, str(error)))
        else:
            self._num_added += 1
            self.progress.added(request, prompt if isinstance(prompt, str) else "")


def _print_error(message: str) -> None:
    print(f"pointsman: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
