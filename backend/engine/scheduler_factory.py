"""Makes the scheduler of an engine: limits, adapters and prompt tables follow from what the engine loaded."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.adapters.table import Adapters, Loader, NoLoader
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.resolved_settings import spread_tokens
from tridecode.backend.engine.grammars.loading import load_grammars
from tridecode.backend.engine.host_tier.tier import HostTier
from tridecode.backend.engine.prompt_tables.book import PromptBook
from tridecode.backend.engine.schedule.admission import SchedulerLimits
from tridecode.backend.engine.schedule.drafts import may_verify
from tridecode.backend.engine.schedule.scheduler import Scheduler
from tridecode.backend.engine.speculation.combined import CombinedLearning
from tridecode.backend.engine.speculation.depth import DepthPolicy
from tridecode.backend.engine.speculation.device_ids import DeviceIds
from tridecode.backend.engine.speculation.host_lookup import HostLookup
from tridecode.backend.engine.speculation.learning import Learning
from tridecode.backend.engine.speculation.sources import RING_TOKENS, AnswerSources
from tridecode.kernels.operands import Heads


def limits_of(engine: Engine) -> SchedulerLimits:
    """Return the limits of an engine's scheduler."""
    config = engine.config
    assert config.max_sequence_tokens is not None and config.max_step_tokens is not None
    assert config.max_sequences is not None
    return SchedulerLimits(
        num_blocks=engine.state.num_blocks,
        block_tokens=config.block_tokens,
        max_sequences=config.max_sequences,
        max_sequence_tokens=config.max_sequence_tokens,
        max_step_tokens=config.max_step_tokens,
        max_queued_requests=config.max_queued_requests,
        vocab_size=engine.model_config.vocab_size,
        request_timeout_s=config.request_timeout_s,
        max_bad_word_tokens=config.max_bad_word_tokens,
        max_stop_word_tokens=config.max_stop_word_tokens,
        max_logits_bytes=config.max_logits_bytes,
        long_prompt_tokens=engine.model_config.long_prompt_tokens,
        recompute_long=engine.model_config.recomputes_long,
        ring_fault=_ring_fault(engine.model_config, engine.state.model.heads),
        draft_rows=config.slots,
        micro_batches=engine.micro_batches,
        spread_tokens=spread_tokens(engine.model_config, config, engine.device),
        cache_scope=config.cache_scope if config.prefix_cache else "none",
        max_grammar_bytes=config.max_grammar_bytes,
        late_masks=engine.is_asynchronous and engine.ranks.num_stages == 1,
    )


def make_scheduler(
    engine: Engine, tokenizer_dir: Path | None = None, start_grammars: bool = False
) -> Scheduler:
    """Return a scheduler for rank 0 of an engine.

    tokenizer_dir: folder of the model's tokenizer, which grammars need; None: requests with one are refused.
    start_grammars: start the processes that compile grammars before the first request needs them.
    """
    model, config, state = engine.model_config, engine.config, engine.state
    prompts = PromptBook(state.prompt_limits, model.hidden_size, model.vocab_size, config.prompt_table_bytes)
    ends = [model.end_id, *model.more_end_ids]
    grammars = load_grammars(
        tokenizer_dir, model.vocab_size, ends, config.mask_cpu_ms, config.grammar_cpu_ms, start_grammars
    )
    adapters = Adapters(_adapter_loader(engine))
    scheduler = Scheduler(limits_of(engine), time.monotonic, adapters, prompts, grammars, host_tier(engine))
    if config.speculation != "off":
        use_drafts(engine, scheduler)
    return scheduler


def use_drafts(engine: Engine, scheduler: Scheduler) -> None:
    """Let the scheduler verify drafts, which the device finds, or rank 0 where plans have all ids."""
    most = engine.most_drafts
    policy = DepthPolicy(engine.step_costs, most)
    drafter, sources = engine.drafter, AnswerSources(may_verify)
    host = HostLookup(most, RING_TOKENS) if drafter is None else None
    if drafter is None or not drafter.is_planned:
        learning = Learning(policy, sources, host)
    elif drafter.looks_up:
        learning = CombinedLearning(
            policy,
            sources,
            planned=drafter.source,
            keeps_cache=drafter.keeps_cache,
            reads_rows=drafter.reads_rows,
            most_planned=drafter.most_planned,
        )
    else:
        learning = Learning(policy, None, planned=drafter.source, keeps_cache=drafter.keeps_cache)
    scheduler.planner.use_drafter(host or DeviceIds(), learning, most)
    if learning.sources is not None:
        scheduler.on_end.append(sources.finished)


def host_tier(engine: Engine) -> HostTier | None:
    """Return the scheduler's side of an engine's host tier; None if there is none or it holds no block."""
    store = engine.state.host
    if store is None or not store.region.num_slots:
        return None
    region = store.region
    return HostTier(
        region.num_slots,
        region.secret,
        region.entries(),
        engine.config.block_tokens,
        store.most_blocks,
        time.monotonic,
        lambda: store.pinning.shares,
    )


def _adapter_loader(engine: Engine) -> Loader:
    if engine.state.adapters is not None:
        return engine.state.adapters
    if engine.config.batch_invariant and engine.config.lora_path != "none":
        return NoLoader("this engine is batch_invariant, which adapters are not (config.pbtxt)")
    return NoLoader()


def _ring_fault(config: ModelConfig, heads: Iterable[Heads]) -> str:
    """Return SchedulerLimits.ring_fault: why attention depends on the order of keys. heads: one per layer."""
    for layer in heads:
        if layer.slopes is not None or layer.key_bias is not None:
            return "this model's attention (ALiBi) depends on the distance of every key"
    return "this model's attention has a sliding window of its own" if any(config.windows) else ""
