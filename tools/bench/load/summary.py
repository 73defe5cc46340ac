"""Computes the figures of a load run from its records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tridecode.tools.bench.load.worker import Record

#: keys of a distribution, in addition to mean, min and max
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class LoadReport:
    """Figures of one run. Distributions are dicts of milliseconds: mean, min, max, p50, p90, p99; empty if
    nothing was measured.

    first_token_ms: from sending to the first response with tokens. inter_token_ms: gap between a response
    and the previous one, divided by its tokens; one sample per token. token_ms: per request, (last - first) /
    tokens after the first response. request_ms: from sending to the end. tokens_per_response: above 1 where
    the server merged responses that a slow client had not read.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    output_tokens: int
    tokens_per_s: float
    requests_per_s: float
    tokens_per_response: float
    tokens_counted: bool
    first_token_ms: dict[str, float]
    inter_token_ms: dict[str, float]
    token_ms: dict[str, float]
    request_ms: dict[str, float]


def distribution(seconds: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float]:
    """Return mean, min, max and PERCENTILES of `seconds` in milliseconds, each counted `weights` times."""
    if len(seconds) == 0:
        return {}
    values = np.asarray(seconds if weights is None else np.repeat(seconds, weights)) * 1000.0
    figures = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    figures.update({f"p{p}": np.percentile(values, p) for p in PERCENTILES})
    return {key: round(float(value), 4) for key, value in figures.items()}


def token_gaps(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Return (seconds per token, tokens) of each response after the first, (responses - 1,) each."""
    times = np.array([when for when, _ in record.responses])
    tokens = np.array([count for _, count in record.responses], np.int64)
    return np.diff(times) / tokens[1:], tokens[1:]


def first_token_seconds(record: Record) -> float:
    return record.responses[0][0] - record.sent


def summarise(records: list[Record]) -> LoadReport:
    """Return the report of all records of a run, without times and tokens of failed requests."""
    good = [record for record in records if not record.error]
    answered = [record for record in good if record.responses]
    gaps = [token_gaps(record) for record in answered]
    per_token, weights = (np.concatenate(parts) for parts in zip(*gaps)) if gaps else (np.zeros(0),) * 2
    long = [record for record, (_, tokens) in zip(answered, gaps) if len(tokens)]
    token_s = [
        (r.responses[-1][0] - r.responses[0][0]) / sum(count for _, count in r.responses[1:]) for r in long
    ]
    seconds = max(r.ended for r in records) - min(r.sent for r in records) if records else 0.0
    tokens = sum(count for record in good for _, count in record.responses)
    responses = sum(len(record.responses) for record in good)
    return LoadReport(
        requests=len(records),
        failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error).most_common(10)),
        seconds=round(seconds, 4),
        output_tokens=tokens,
        tokens_per_s=round(tokens / seconds, 2) if seconds else 0.0,
        requests_per_s=round(len(good) / seconds, 3) if seconds else 0.0,
        tokens_per_response=round(tokens / responses, 3) if responses else 0.0,
        tokens_counted=all(record.counted for record in good),
        first_token_ms=distribution(np.array([first_token_seconds(record) for record in answered])),
        inter_token_ms=distribution(per_token, weights),
        token_ms=distribution(np.array(token_s)),
        request_ms=distribution(np.array([record.ended - record.sent for record in good])),
    )
