"""Launches steps on a GPU without waiting for earlier steps; sampled tokens stay on the device.

A step is *plain* if all its rows sample by temperature, top-k, top-p, min-p and seed, or greedily, and the step has no
edits, log probabilities, drafts, pooling or copies of KV. A plain step runs entirely on the device. Input tokens that
earlier steps sample are read from places on the device (`DeviceTokens`), so a plain step can be launched before the
previous step has ended. Its results are copied to the host in one copy. For other steps only the forward pass is
launched, and the host waits for the logits to sample tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pointsman.engine.arrays import Int64Array
from pointsman.engine.attention.paged import AttentionBackend
from pointsman.engine.attention.triton_backend import TritonAttention
from pointsman.engine.device import FromDevice, to_device
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model.decode_graphs import CudaRecorder, DecodeGraphs, DecodeRows, DeviceTokens, Recorder
from pointsman.engine.model.forward import run_paged
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.sampling.race_triton import DeviceParameters, DeviceRace

if TYPE_CHECKING:
    from pointsman.core import SchedulerConfig
    from pointsman.engine.model.prepared import PreparedStep


class DeviceSteps:
    """Launches the steps of one engine.

    Args:
        loaded: the model.
        pool: the model's KV pool.
        backend: the attention backend.
        config: the scheduler's configuration.
    """

    def __init__(self, loaded: LoadedModel, pool: KVPool, backend: AttentionBackend, config: SchedulerConfig) -> None:
        self._loaded = loaded
        self._pool = pool
        self._backend = backend
        self._device = pool.device
        self._config = config
        self._race = DeviceRace(config.max_num_seqs, loaded.vocab_size, pool.device)
        # A row is reused only after the steps in flight that use it have ended, so there are more rows than requests.
        num_rows = (1 + config.max_steps_in_flight) * config.max_num_seqs
        self._tokens = DeviceTokens(num_rows * config.max_steps_in_flight, pool.device)
        self._sampled = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=pool.device)
        self._ok = torch.zeros(config.max_num_seqs, dtype=torch.uint8, device=pool.device)
        self.graphs: DecodeGraphs | None = None
        """CUDA graphs of decode steps; None: decode steps are launched kernel by kernel."""

    def record_graphs(self, max_bytes: int, allocated_bytes: Callable[[], int], recorder: Recorder | None) -> None:
        """Record graphs of decode steps, if the attention backend supports graphs; see `ModelRunner.record_graphs`."""
        if not isinstance(self._backend, TritonAttention):
            return
        self.graphs = DecodeGraphs(
            self._loaded,
            self._pool,
            self._backend,
            self._race,
            self._tokens,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self._config.max_model_len,
            recorder=recorder or CudaRecorder(),
        )
        self.graphs.record_all(max_bytes, allocated_bytes)

    @staticmethod
    def is_plain(prepared: PreparedStep) -> bool:
        """Whether the step is plain, so that `launch` can run it."""
        sampling = prepared.sampling_batch
        has_more = prepared.prompt_chunks or prepared.pooled_chunks or prepared.verification is not None
        needs_host = sampling.edits is not None or sampling.logprobs or sampling.errors
        return not (has_more or needs_host or prepared.transfers is not None or prepared.num_rows == 0)

    def launch(self, prepared: PreparedStep) -> FromDevice:
        """Launch a plain step. The results are `tokens` [s] and `ok` [s]: the sampled tokens, and whether they are
        valid."""
        num_sampled = len(prepared.sampling)
        size = self._graph_for(prepared)
        columns = DeviceParameters.columns(prepared.sampling_batch, size or num_sampled)
        with torch.inference_mode():
            if size is not None and self.graphs is not None:
                self.graphs.forward(self._decode_rows(prepared), columns, size)
                sampled, ok = self.graphs.sample(size)
            else:
                links = prepared.links
                places = {} if links is None else {"places": links.sampled}
                logits, tensors = self._launch_kernels(prepared, {**columns, **places})
                sampled, ok = self._sampled[:num_sampled], self._ok[:num_sampled]
                if num_sampled:
                    parameters = DeviceParameters(**{name: tensors[name] for name in columns})
                    self._race.choose(logits, parameters, sampled, ok)
                    if links is not None:
                        self._tokens.tokens.index_copy_(0, tensors["places"], sampled)
            return FromDevice({"tokens": sampled[:num_sampled], "ok": ok[:num_sampled]})

    def forward(self, prepared: PreparedStep) -> Tensor:
        """Logits [len(logits_at), vocab_size] of a step whose tokens the host samples and then stores with `put`."""
        size = self._graph_for(prepared)
        with torch.inference_mode():
            if size is not None and self.graphs is not None:
                return self.graphs.forward(self._decode_rows(prepared, stores=False), None, size)
            return self._launch_kernels(prepared, {})[0]

    def put(self, places: Int64Array, token_ids: Int64Array) -> None:
        """Store tokens that the host sampled, so that later steps can read them on the device."""
        self._ensure_places(places)
        tensors = to_device({"places": places, "tokens": token_ids}, self._device)
        self._tokens.tokens.index_copy_(0, tensors["places"], tensors["tokens"])

    def _ensure_places(self, places: Int64Array) -> None:
        if not self._tokens.has_places(places):
            self._tokens.grow(int(places.max()) + 1)
            if self.graphs is not None:
                self.graphs.record_again()

    def _graph_for(self, prepared: PreparedStep) -> int | None:
        """Number of rows of the graph that can compute the step; None: no graph can compute it."""
        if prepared.links is not None:
            self._ensure_places(prepared.links.sampled)
        num_rows = prepared.num_rows
        is_decode = prepared.batch.num_tokens == num_rows == prepared.num_logits == len(prepared.sampling)
        return self.graphs.size_for(num_rows) if is_decode and self.graphs is not None else None

    @staticmethod
    def _decode_rows(prepared: PreparedStep, *, stores: bool = True) -> DecodeRows:
        links = prepared.links
        sources = np.full(prepared.num_rows, -1, dtype=np.int64)
        if links is not None:
            sources[links.unsampled] = links.sources
        places = links.sampled if links is not None and stores else None
        return DecodeRows(prepared.batches, prepared.token_ids.numpy(), sources, places)

    def _launch_kernels(
        self, prepared: PreparedStep, more_arrays: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Launch a step kernel by kernel; returns the step's logits, and all its input arrays, `more_arrays` included,
        on the device."""
        links = prepared.links
        arrays: dict[str, npt.NDArray[Any]] = {
            "token_ids": prepared.token_ids.numpy(),
            "positions": prepared.batch.positions,
            "logits_at": prepared.logits_at,
            **more_arrays,
        }
        if links is not None and len(links.unsampled):
            arrays |= {"unsampled": links.unsampled, "sources": links.sources}
        tensors = to_device(arrays, self._device)
        token_ids = tensors["token_ids"]
        if "unsampled" in tensors:
            token_ids.index_copy_(0, tensors["unsampled"], self._tokens.tokens[tensors["sources"]])
        logits = run_paged(
            self._loaded,
            self._pool,
            self._backend,
            [self._backend.plan(batch) for batch in prepared.batches],
            token_ids,
            tensors["positions"],
            None if prepared.needs_all_logits else tensors["logits_at"],
        )
        return logits, tensors
