"""Accuracy: compares predicted with measured times of the same requests, in the same order.

    TTFT = first token - queued
    E2E  = last token - queued
    TPOT = (E2E - TTFT) / (output tokens - 1), of requests with at least two output tokens

Errors are fractions, predicted / measured - 1: 0.01 means that the prediction is 1 % too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from pointsman.traces import MeasuredRequest

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Times:
    """One entry for each request: when it was queued and got its first and last token, in seconds; its number of output
    tokens."""

    queued: FloatArray
    first_token: FloatArray
    last_token: FloatArray
    num_output_tokens: Int64Array

    @classmethod
    def of(cls, measured: Sequence[MeasuredRequest]) -> Times:
        """The times of measured requests."""
        return cls(
            np.array([each.queued for each in measured]),
            np.array([each.first_token for each in measured]),
            np.array([each.last_token for each in measured]),
            np.array([each.request.num_output_tokens for each in measured], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.queued)

    def __getitem__(self, which: npt.NDArray[np.intp]) -> Times:
        return Times(self.queued[which], self.first_token[which], self.last_token[which], self.num_output_tokens[which])

    @property
    def ttft(self) -> FloatArray:
        return self.first_token - self.queued

    @property
    def e2e(self) -> FloatArray:
        return self.last_token - self.queued

    @property
    def tpot(self) -> FloatArray:
        """Time per output token of each request; 0 for a request with one output token."""
        return (self.last_token - self.first_token) / np.maximum(self.num_output_tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class RequestErrors:
    """Errors of predicted request times, as fractions; None: no request has at least two output tokens."""

    num_requests: int
    e2e_mape: float
    """Mean over requests of |predicted / measured - 1| of the end-to-end time."""
    e2e_bias: float
    """Mean over requests of predicted / measured - 1 of the end-to-end time."""
    ttft_mean_error: float
    ttft_p50_error: float
    ttft_p99_error: float
    tpot_mean_error: float | None

    @classmethod
    def between(cls, predicted: Times, measured: Times) -> RequestErrors:
        """The errors of `predicted`, relative to `measured`."""
        relative = predicted.e2e / measured.e2e - 1
        has_tpot = (measured.num_output_tokens > 1) & (measured.tpot > 0)
        return cls(
            num_requests=len(measured),
            e2e_mape=float(np.abs(relative).mean()),
            e2e_bias=float(relative.mean()),
            ttft_mean_error=float(predicted.ttft.mean() / measured.ttft.mean() - 1),
            ttft_p50_error=float(np.percentile(predicted.ttft, 50) / np.percentile(measured.ttft, 50) - 1),
            ttft_p99_error=float(np.percentile(predicted.ttft, 99) / np.percentile(measured.ttft, 99) - 1),
            tpot_mean_error=float(predicted.tpot[has_tpot].mean() / measured.tpot[has_tpot].mean() - 1)
            if has_tpot.any()
            else None,
        )

    def to_dict(self) -> dict[str, float | int | None]:
        """The errors by field name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Errors of predicted step times, as fractions."""

    num_steps: int
    step_mape: float
    """Mean over steps of |predicted / measured - 1|."""
    step_bias: float
    """Mean over steps of predicted / measured - 1."""
    total_error: float
    """Error of the sum of all step times."""

    @classmethod
    def between(cls, predicted: FloatArray, measured: FloatArray) -> StepErrors:
        """The errors of `predicted`, relative to `measured`."""
        relative = predicted / measured - 1
        return cls(
            num_steps=len(measured),
            step_mape=float(np.abs(relative).mean()),
            step_bias=float(relative.mean()),
            total_error=float(predicted.sum() / measured.sum() - 1),
        )

    def to_dict(self) -> dict[str, float | int | None]:
        """The errors by field name, for JSON."""
        return asdict(self)
