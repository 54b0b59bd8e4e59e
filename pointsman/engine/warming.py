"""Warm-up: compiles kernels, imports packages and starts processes before the first requests need them.

Several things are made on first use: the kernels for the model's types and for drawing tokens are compiled (this takes
seconds, unless an earlier process left them on disk), xgrammar is imported, the process that compiles grammars is
started. `warm_up` runs requests of every kind through the model:

    plain        chunks of a prompt, decodes, both in one step; drafts if the engine has them
    others       each way to sample, edits of logits, log probabilities, embeddings, structured output

These requests run on the engine's model, with a separate scheduler, KV pool and counters. So they leave no trace in the
engine: no request, step, cached block, event or recorded call.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from pointsman.core import FinishReason, Scheduler, SchedulerConfig
from pointsman.engine.counters import EngineCounters
from pointsman.engine.drafts.prompt_lookup import PromptLookup
from pointsman.engine.errors import EngineStepError, first_line
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.machine import return_freed_pages
from pointsman.engine.model.pooling import check_can_pool
from pointsman.engine.model.runner import ModelRunner
from pointsman.engine.outputs.processor import OutputProcessor
from pointsman.engine.params.engine_args import DEFAULT_MAX_NGRAM, DEFAULT_MIN_NGRAM
from pointsman.engine.params.pooling import PoolingParams
from pointsman.engine.params.requests import to_request
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.params.structured_outputs import StructuredOutputsParams
from pointsman.engine.pausing import Pausing
from pointsman.engine.sampling.sampler import import_draw_rows
from pointsman.engine.step_loop import StepLoop

if TYPE_CHECKING:
    from pointsman.engine.engine import Engine
    from pointsman.engine.grammar.process import CompiledGrammar, GrammarServer

logger = logging.getLogger(__name__)

BUDGET, MAX_NUM_SEQS, MAX_DRAFTS = 32, 10, 2
"""Limits of a warm-up step: token budget, sequence slots and drafts. They are small, because compiled code does not
depend on sizes, and a large model takes long for many tokens."""
LONG_PROMPT, SHORT_PROMPT = 40, 6
"""Lengths, in tokens, of the prompts of warm-up requests. The long prompt takes two steps."""
NUM_TOKENS, NUM_TOKENS_ALONE = 3, 5
"""Number of output tokens of most warm-up requests, and of the request that runs alone in the last steps."""


def warm_up(engine: Engine, server: GrammarServer | None = None) -> None:
    """Run requests of every kind on the engine's model. Call it in the thread that owns the engine.

    If only requests other than plain ones fail, a warning is logged, because the engine can still serve plain requests.

    Args:
        engine: the engine to warm up. It does not change, except that its process for grammars is started.
        server: a process that compiles grammars, started earlier for this engine alone; None: a new one is started.

    Raises:
        EngineStepError: the model fails, so no request could be served.
    """
    started = time.monotonic()
    grammar = engine.grammars.warm_up(server)  # in the background
    if engine.max_model_len > SHORT_PROMPT + NUM_TOKENS_ALONE:
        is_plain = True
        try:
            rehearsal = _Rehearsal(engine)
            rehearsal.add_plain()
            rehearsal.run(drafts=bool(engine.scheduler.config.num_draft_tokens))
            is_plain = False
            _compile_race(engine)
            rehearsal.add_others()
            rehearsal.run()
            rehearsal.add_structured(grammar)
            rehearsal.run()
        except Exception as error:
            if is_plain and isinstance(error, EngineStepError):
                raise
            logger.warning("warm-up: some requests may fail, or be slow at first: %s", first_line(error))
        return_freed_pages()
    grammar.result()
    logger.info("warmed up in %.1f s", time.monotonic() - started)


def _compile_race(engine: Engine) -> None:
    """Compile the kernel that draws tokens, if the engine uses it, or wait until another process has compiled it."""
    if engine.loaded.model.device.type == "cpu" and import_draw_rows() is not None:
        from pointsman.engine.sampling.race_kernels import compile_race

        compile_race()


class _Rehearsal:
    """Runs warm-up requests on an engine's model, with its own scheduler, KV pool, runner, outputs and step loop."""

    def __init__(self, engine: Engine) -> None:
        knobs = engine.scheduler.config
        tokens_each = LONG_PROMPT + NUM_TOKENS_ALONE + MAX_DRAFTS
        config = SchedulerConfig(
            num_blocks=MAX_NUM_SEQS * knobs.max_blocks(tokens_each),
            kv_groups=knobs.kv_groups,
            max_model_len=engine.max_model_len,
            block_size=knobs.block_size,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET,
            max_steps_in_flight=knobs.max_steps_in_flight,
            num_draft_tokens=min(knobs.num_draft_tokens, MAX_DRAFTS),
        )
        loaded, counters = engine.loaded, EngineCounters()
        self._engine = engine
        self._scheduler = Scheduler(config)
        pool = KVPool(
            loaded.layers,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=engine.kv_pool.dtype,
            device=loaded.model.device,
            layout=engine.kv_pool.layout,
        )
        self._runner = ModelRunner(loaded, pool, self._scheduler, backend=engine.attention)
        self._outputs = OutputProcessor(loaded.tokenizer, counters)
        proposer = (
            PromptLookup(
                self._scheduler, DEFAULT_MIN_NGRAM, DEFAULT_MAX_NGRAM, counters, self._runner.num_computed_rows
            )
            if config.num_draft_tokens
            else None
        )
        self._steps = StepLoop(
            self._scheduler,
            self._runner,
            self._outputs,
            proposer=proposer,
            kv_events=None,
            pausing=Pausing(self._scheduler, time.monotonic, lambda: None),
            before_schedule=lambda: None,
            clock=time.monotonic,
            counters=counters,
        )
        self._num_requests = 0

    def add_plain(self) -> None:
        """Add two greedy requests: one whose prompt takes several chunks, and one with a short prompt."""
        length = min(LONG_PROMPT, self._engine.max_model_len - NUM_TOKENS)
        self._add(SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True), length)
        self._add(SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))

    def add_others(self) -> None:
        """Add requests that together use every other feature: sampling, logit edits, log probabilities, stop strings
        and embeddings."""
        has_text = self._engine.tokenizer is not None
        words = ("warm",) if has_text else ()
        for params in (
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, top_k=20, min_p=0.01, logprobs=0),
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, logprobs=2, prompt_logprobs=2),
            SamplingParams(max_tokens=NUM_TOKENS, top_p=0.9, logit_bias={0: 1.0}, bad_words=words, stop=words),
            SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, allowed_token_ids=(0, 1), min_tokens=1),
            SamplingParams(
                max_tokens=NUM_TOKENS_ALONE,
                ignore_eos=True,
                top_p=0.9,
                repetition_penalty=1.1,
                presence_penalty=0.5,
                frequency_penalty=0.5,
                seed=0,
            ),
        ):
            self._add(params)
        try:
            check_can_pool(self._engine.loaded.model)
        except ValueError:  # this model has no embeddings
            return
        self._add(PoolingParams("last"))
        self._add(PoolingParams("mean"))

    def add_structured(self, grammar: Future[CompiledGrammar | None]) -> None:
        """Wait until the grammar is compiled, and add a request with the grammar; add no request if the model cannot
        have structured output."""
        compiled = grammar.result()
        if compiled is not None:
            self._add(
                SamplingParams(max_tokens=NUM_TOKENS, structured_outputs=StructuredOutputsParams(json_object=True)),
                grammar=compiled,
            )

    def _add(
        self,
        params: SamplingParams | PoolingParams,
        num_tokens: int = SHORT_PROMPT,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Add a request. No two prompts share a prefix. Each prompt repeats itself, so that prompt lookup finds
        drafts."""
        self._num_requests += 1
        vocab_size = self._engine.loaded.vocab_size
        token_ids = [(self._num_requests + index % 3) % vocab_size for index in range(num_tokens)]
        now = time.monotonic()
        request = to_request(
            f"warm-up-{self._num_requests}",
            token_ids,
            params,
            arrival_time=now,
            eos_token_ids=self._engine.eos_token_ids,
            max_model_len=self._engine.max_model_len,
        )
        self._scheduler.add(request, now)
        if isinstance(params, PoolingParams):
            self._runner.pooler.add(request, params)
        if grammar is not None:
            self._runner.sampler.use_grammar(request, grammar)
        self._outputs.add(request, None, request.metadata, eager_text=True)

    def run(self, *, drafts: bool = False) -> None:
        """Step until every request has finished; a request that fails while its step succeeds is logged.

        Args:
            drafts: whether each row gets a draft to verify, even if prompt lookup proposes none.

        Raises:
            EngineStepError: a step failed.
        """
        while len(self._steps) or self._scheduler.has_unfinished_requests():
            step = self._steps.run()
            if drafts:
                one_each = np.ones(step.num_rows, dtype=np.int64)
                self._scheduler.propose(step, np.zeros_like(one_each), one_each, time.monotonic())
            for output in self._outputs.take_kept_outputs():
                if output.finished and output.outputs[0].finish_reason == FinishReason.ERROR.value:
                    logger.warning("warm-up: a request failed: %s", output.outputs[0].finish_detail)
