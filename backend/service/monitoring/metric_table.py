"""The metrics of Tridecode on Triton's metrics page: one row each, and nothing else repeats a row.

The page's HELP and TYPE lines (`door_metrics.py`) and the tables of docs/reference/metrics.md are generated
from the rows (`python -m tridecode.tools.generated_docs.metrics --write`). Names follow Prometheus: base
units, `_total` for totals.
"""

from __future__ import annotations

from dataclasses import dataclass

# upper bounds of buckets, in seconds
# fmt: off
GAP_BOUNDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
    2.0, 5.0, 10.0, 30.0,
)
_FIRST_BOUNDS = (
    0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0,
)
_WHOLE_BOUNDS = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0,
    60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
)
# fmt: on
_QUEUE_BOUNDS = (0.001, *_FIRST_BOUNDS)

COUNTER, GAUGE, HISTOGRAM, BUCKETS = "counter", "gauge", "histogram", "buckets"


@dataclass(frozen=True)
class Metric:
    """One metric.

    kind: "counter", "gauge", "histogram", or "buckets": a histogram that is published as the counters
    NAME_bucket, NAME_sum and NAME_count. help: its HELP line. labels: names. bounds: upper bounds of a
    histogram's buckets, in its unit.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()

    @property
    def families(self) -> tuple[str, ...]:
        """Return the names of its families on the metrics page."""
        if self.kind != BUCKETS:
            return (self.name,)
        return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))


_MODEL = ("model",)
#: published by every model that has an engine
DOOR_METRICS = (
    Metric(
        "tridecode_requests_total",
        COUNTER,
        "Requests that ended, by outcome: ok, or the code of the error in lower case",
        ("model", "outcome"),
    ),
    Metric(
        "tridecode_prompt_tokens_total",
        COUNTER,
        "Tokens of the prompts of accepted requests that ended, virtual tokens included",
        _MODEL,
    ),
    Metric(
        "tridecode_output_tokens_total",
        COUNTER,
        "Tokens generated for requests that ended, as reported to their clients",
        _MODEL,
    ),
    Metric(
        "tridecode_resumed_requests_total",
        COUNTER,
        "Requests whose engine died and that the next engine continued",
        _MODEL,
    ),
    Metric(
        "tridecode_resume_wait_seconds_total",
        COUNTER,
        "Time from the death of an engine to the next one, in seconds, summed over the continued requests",
        _MODEL,
    ),
    Metric(
        "tridecode_time_to_first_token_seconds",
        HISTOGRAM,
        "Time from the arrival of a request in its model to its first token; requests without a token are "
        "left out",
        _MODEL,
        _FIRST_BOUNDS,
    ),
    Metric(
        "tridecode_inter_token_seconds",
        BUCKETS,
        "Time between two deliveries of tokens of one sequence; tokens that share a response have one gap",
        _MODEL,
        GAP_BOUNDS,
    ),
    Metric(
        "tridecode_time_per_output_token_seconds",
        HISTOGRAM,
        "Mean time between the tokens of one request after its first: one value per request, of its longest "
        "sequence",
        _MODEL,
        GAP_BOUNDS,
    ),
    Metric(
        "tridecode_request_seconds",
        HISTOGRAM,
        "Time from the arrival of a request in its model to its last response; requests that succeeded",
        _MODEL,
        _WHOLE_BOUNDS,
    ),
    Metric(
        "tridecode_queue_seconds",
        HISTOGRAM,
        "Time that a request waited in the engine for a batch slot and cache blocks; requests that got them",
        _MODEL,
        _QUEUE_BOUNDS,
    ),
)

_ENGINE = ("engine",)


def _engine(name: str, kind: str, text: str, *labels: str) -> Metric:
    suffix = "_total" if kind == COUNTER else ""
    return Metric(f"tridecode_engine_{name}{suffix}", kind, text, (*_ENGINE, *labels))


READY = _engine("ready", GAUGE, "1 while the engine sends heartbeats, 0 while it starts or is rebuilt")
#: field of EngineBeat -> its metric
BEAT_METRICS = {
    "running": _engine("running", GAUGE, "Batch slots in use: sequences that the engine computes"),
    "free_blocks": _engine(
        "free_blocks", GAUGE, "Blocks of the KV cache that no sequence uses; they may be cached"
    ),
    "total_blocks": _engine("blocks", GAUGE, "Blocks of the KV cache"),
    "epoch": _engine("epoch", GAUGE, "Number of the running engine: 1 for the first, one more per rebuild"),
    "steps": _engine("steps", COUNTER, "Steps of the model, each of one token per decoding sequence"),
    "waiting": _engine("open_requests", GAUGE, "Requests that the engine has accepted and not ended"),
}
#: name in EngineBeat.metrics, without a label -> its metric
ENGINE_METRICS = {
    "requests": _engine("requests", COUNTER, "Requests that the engine accepted"),
    "refused": _engine(
        "refused", COUNTER, "Requests that the engine refused: no room, or a value out of range"
    ),
    "prompt_tokens": _engine("prompt_tokens", COUNTER, "Prompt tokens of the accepted requests"),
    "computed_prompt_tokens": _engine(
        "computed_prompt_tokens", COUNTER, "Tokens that prefill computed; also outputs, after a preemption"
    ),
    "cached_prompt_tokens": _engine(
        "cached_prompt_tokens",
        COUNTER,
        "Tokens that prefill did not compute, because their keys and values were cached, by place",
        "tier",
    ),
    "cache_blocks": _engine(
        "cache_blocks",
        GAUGE,
        "Blocks of the KV cache by state: used by a sequence, cached for later requests, free",
        "state",
    ),
    "evicted_blocks": _engine("evicted_blocks", COUNTER, "Cached blocks that made room for others"),
    "host_blocks": _engine("host_blocks", GAUGE, "Blocks of the host tier by state: cached, free", "state"),
    "host_evicted_blocks": _engine(
        "host_evicted_blocks", COUNTER, "Blocks of the host tier that made room for others"
    ),
    "host_faults": _engine(
        "host_faults", COUNTER, "Blocks of the host tier with a wrong checksum, which were computed again"
    ),
    "output_tokens": _engine("output_tokens", COUNTER, "Tokens that the engine generated"),
    "draft_tokens": _engine(
        "draft_tokens", COUNTER, "Drafts that steps verified, by their origin", "drafter"
    ),
    "accepted_draft_tokens": _engine(
        "accepted_draft_tokens", COUNTER, "Drafts that became tokens of an answer", "drafter"
    ),
    "grammar_compilations": _engine(
        "grammar_compilations", COUNTER, "Compiled schemas, grammars and regular expressions"
    ),
    "grammar_compile_seconds": _engine(
        "grammar_compile_seconds", COUNTER, "Time spent on checking and compiling grammars, in seconds"
    ),
    "grammar_cache_hits": _engine(
        "grammar_cache_hits", COUNTER, "Requests whose schema or grammar was already compiled"
    ),
    "grammar_masks": _engine("grammar_masks", COUNTER, "Masks of the tokens that a grammar allows next"),
    "grammar_late_masks": _engine(
        "grammar_late_masks",
        COUNTER,
        "Tokens that were computed again, because their mask came after the step",
    ),
    "grammar_failures": _engine(
        "grammar_failures",
        COUNTER,
        "Requests that failed because of their grammar, by reason: refused (invalid or not supported), "
        "time or memory (a limit of the compilation or of a mask), answer (no token is allowed), internal",
        "reason",
    ),
    "preemptions": _engine(
        "preemptions", COUNTER, "Sequences that gave their cache blocks back and are computed again"
    ),
    "cancelled": _engine("cancelled", COUNTER, "Requests that were cancelled by their client or their door"),
    "resumed": _engine(
        "resumed", COUNTER, "Requests that a rebuilt engine continued after the tokens that were sent before"
    ),
    "requests_waiting": _engine("waiting", GAUGE, "Sequences that wait for a batch slot and cache blocks"),
    "sessions": _engine("sessions", GAUGE, "Conversations that the engine keeps between their rounds"),
    "session_blocks": _engine("session_blocks", GAUGE, "Blocks of the KV cache that idle conversations hold"),
    "step_seconds": _engine("step_seconds", COUNTER, "Time spent in steps of the model, in seconds"),
    "shadow_ended": _engine("shadow_ended", COUNTER, "Sequences that ended while shadow runs were enabled"),
    "shadow_queued": _engine("shadow_queued", GAUGE, "Sequences that wait for their shadow run"),
    "shadow_dropped": _engine(
        "shadow_dropped", COUNTER, "Chosen sequences that found the queue of shadow runs full"
    ),
    "shadow_failed": _engine("shadow_failed", COUNTER, "Shadow runs that failed"),
    "shadow_skipped": _engine(
        "shadow_skipped", COUNTER, "Chosen sequences that cannot be compared, by reason", "reason"
    ),
    "shadow_seconds": _engine("shadow_seconds", COUNTER, "Time spent in shadow runs, in seconds"),
    "shadow_tokens": _engine("shadow_tokens", COUNTER, "Generated tokens that shadow runs compared"),
    "shadow_tokens_agreeing": _engine(
        "shadow_tokens_agreeing", COUNTER, "Compared tokens where the 16-bit model has the same greedy token"
    ),
    "shadow_tokens_kl": _engine(
        "shadow_tokens_kl", COUNTER, "Sum of the KL divergences at compared tokens, in nats"
    ),
    "shadow_kl": _engine("shadow_kl", BUCKETS, "Mean KL divergence per token of a shadow run, in nats"),
    "shadow_agreement": _engine(
        "shadow_agreement", BUCKETS, "Share of the greedy tokens of a shadow run that agree, from 0 to 1"
    ),
}
#: heartbeat values that are already published under another name
REPEATED = frozenset({"steps", "sequences_running"})

ALL_METRICS = (*DOOR_METRICS, READY, *BEAT_METRICS.values(), *ENGINE_METRICS.values())
