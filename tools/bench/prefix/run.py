"""`tridecode bench prefix`: runs with the prefix cache and without it, in turns; one JSON file, one plot."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.scheduler_factory import limits_of
from tridecode.tools.bench.engines.ours import described, open_engine
from tridecode.tools.bench.measure import Job
from tridecode.tools.bench.prefix.figures import Played, compared
from tridecode.tools.bench.prefix.index_bench import measure_index
from tridecode.tools.bench.prefix.player import Player
from tridecode.tools.bench.prefix.prediction import cost_of, predicted_rate
from tridecode.tools.bench.prefix.traffic import Traffic, make_traffic
from tridecode.tools.bench.reports.plots import plot_prefix
from tridecode.tools.bench.reports.report import table, write_report
from tridecode.tools.progress import spinner

_COLUMNS = {
    "seconds": "s",
    "tokens_per_s": "tokens/s",
    "computed": "computed",
    "cached": "cached",
    "host": "of host",
    "hit_p50_ms": "first ms hit",
    "hit_p99_ms": "p99",
    "miss_p50_ms": "first ms miss",
    "miss_p99_ms": "p99",
}
BLOCK_TOKENS = 32
_WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class PrefixPlan:
    """A measurement. url: gRPC of a running server, "" for an engine in this process; metrics: its metrics,
    host:port. rounds: of each conversation. repeats: alternating runs. vocab_size: of a server's model.
    """

    load: str
    conversations: int
    rounds: int
    common: int
    repeats: int
    seed: int = 0
    url: str = ""
    metrics: str = ""
    vocab_size: int = 1000


class _Player(Protocol):
    def play(self, traffic: Traffic, use: str, salt: str) -> Played: ...


def run_prefix(plan: PrefixPlan, job: Job, output: Path) -> None:
    """Measure, print a table, write prefix-<load>-<model>.json and .png."""
    if plan.url:
        from tridecode.tools.bench.prefix.server_player import ServerPlayer

        with spinner("the server") as say:
            found = _alternate(ServerPlayer(plan.url, plan.metrics), plan, plan.vocab_size, say)
        name = "server"
    else:
        with spinner("loading") as say, open_engine(job) as engine:
            block_tokens, vocab_size = engine.config.block_tokens, engine.model_config.vocab_size
            predicted = {} if job.host_cache_bytes else _predict(plan, job, engine)
            other = "device" if job.host_cache_bytes else "off"
            found = _alternate(Player(engine), plan, vocab_size, say, block_tokens, other)
            found = {**described(engine, job), **found, **_over(predicted, found)}
        name = job.preset or Path(job.directory).resolve().name
    found["index"] = measure_index()
    _show(plan, found)
    settings = {**asdict(plan), "job": asdict(job)}
    stem = f"prefix-{plan.load}-{name}"
    picture = plot_prefix(output / f"{stem}.png", f"{plan.load}: {name}", found.pop("played"))
    path = write_report(output / f"{stem}.json", "prefix", settings, found)
    Console().print(f"wrote {path}, {picture}", highlight=False)


def traffic_of(plan: PrefixPlan, vocab_size: int, seed: int) -> Traffic:
    return make_traffic(plan.load, vocab_size, plan.conversations, plan.rounds, plan.common, seed)


def _alternate(
    player: _Player,
    plan: PrefixPlan,
    vocab_size: int,
    say: Any,
    block_tokens: int = BLOCK_TOKENS,
    other: str = "off",
) -> dict[str, Any]:
    """Alternate runs of the load with and without the cache, after one short warm-up run of each.

    Each run has its own salt, so it does not find blocks of earlier runs. other: `use` of the runs under
    "off", see Player.play.
    """
    played: dict[str, list[Played]] = {"on": [], "off": []}
    least = traffic_of(plan, vocab_size, plan.seed).least_computed(block_tokens)
    for number in range(plan.repeats + 1):
        for key in ("on", "off") if number % 2 else ("off", "on"):
            use = other if key == "off" else key
            say(f"{plan.load}, cache {use}, run {number} of {plan.repeats}")
            chosen = plan if number else replace(plan, rounds=min(plan.rounds, _WARM_UP_ROUNDS))
            traffic = traffic_of(chosen, vocab_size, plan.seed)
            done = player.play(traffic, use, f"bench {plan.seed} {number} {use}")
            if number:
                played[key].append(done)
    return {**compared(played["on"], played["off"], least), "off_is": other, "played": played}


def _predict(plan: PrefixPlan, job: Job, engine: Engine) -> dict[str, float]:
    """Return and print the predicted tokens per second with and without the cache; {} if the costs of the
    job's steps are unknown on this card.
    """
    device = engine.device
    cost = cost_of(job, torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    if cost is None:
        return {}
    limits, vocab_size = limits_of(engine), engine.model_config.vocab_size
    found = {
        use: round(predicted_rate(traffic_of(plan, vocab_size, plan.seed), limits, cost, use), 1)
        for use in ("on", "off")
    }
    Console().print(f"predicted tokens/s: {found['on']:,} on, {found['off']:,} off", highlight=False)
    return found


def _over(predicted: dict[str, float], found: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a prediction, with the ratio of measured to predicted tokens per second
    (medians)."""
    if not predicted:
        return {}
    medians = {use: statistics.median(run["tokens_per_s"] for run in found[use]) for use in predicted}
    over = {use: round(medians[use] / rate, 4) for use, rate in predicted.items()}
    return {"predicted_tokens_per_s": predicted, "tokens_per_s_over_predicted": over}


def _show(plan: PrefixPlan, found: dict[str, Any]) -> None:
    console = Console()
    names = {"on": "on", "off": found["off_is"]}
    rows = [[name, *(run[key] for key in _COLUMNS)] for use, name in names.items() for run in found[use]]
    parts = "host tier" if found["off_is"] == "device" else "prefix cache"
    title = f"{plan.load}, {parts} on and off"
    console.print(table(title, ["", *_COLUMNS.values()], rows))
    index = found["index"]
    console.print(
        f"tokens/s over off: {found['tokens_per_s_over_off']}; computed over least: "
        f"{found['computed_over_least']} ({found['least_computed']:,} tokens)\n"
        f"index of {index['blocks']:,} blocks: {index['tokens']:,} tokens hashed in {index['hash_us']} us, "
        f"found in {index['find_us']} us; {index['bytes_per_block']} bytes a block",
        highlight=False,
    )
    if "predicted_tokens_per_s" in found:
        console.print(
            f"tokens/s over predicted: {found['tokens_per_s_over_predicted']}; "
            f"predicted: {found['predicted_tokens_per_s']}",
            highlight=False,
        )
    for run in found["on"]:
        if run.get("ins_steps"):
            kinds = (
                ("plain", "without copies"),
                ("ins", "with copies from the host tier"),
                ("outs", "to it"),
            )
            texts = [f"{run[f'{kind}_ms']} ({run[f'{kind}_mean_ms']}) {text}" for kind, text in kinds]
            console.print(
                f"steps of {run['decodes']} decoding rows, median (mean) ms: {', '.join(texts)}",
                highlight=False,
            )


def check_plan(plan: PrefixPlan) -> None:
    """Raises ConfigError for sizes without meaning."""
    if plan.url and not plan.metrics:
        raise ConfigError("--url without --metrics; wanted host:port of the server's metrics as well")
    if plan.common < 1:
        raise ConfigError(f"--common is {plan.common}; wanted 1 or more tokens")
