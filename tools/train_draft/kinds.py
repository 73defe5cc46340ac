"""The kinds of drafters: the states that each reads from the target, its training and its files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec.structs import replace
from torch import Tensor

from tridecode.backend.base.errors import ConfigError, UnsupportedError
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.weights.draft_files import (
    FORMAT,
    GLIDE,
    HEADS,
    MODEL,
    DraftInfo,
    layer_fields,
    write_draft,
    write_info,
)
from tridecode.tools.train_draft.figures import tokens_per_step
from tridecode.tools.train_draft.glide import Glide, Seen, glide_drafts, read_seen, train_glide
from tridecode.tools.train_draft.hidden import read_hidden
from tridecode.tools.train_draft.job import Job
from tridecode.tools.train_draft.small_model import cut_model, model_drafts, save_model, train_model
from tridecode.tools.train_draft.target import Target
from tridecode.tools.train_draft.texts import Texts
from tridecode.tools.train_draft.training import states_of, train_heads


class Kind:
    """One kind of drafter. Methods are called in the order check, elements, read, train; only `read` uses the
    engine."""

    def __init__(self, target: Target, job: Job):
        self.target, self.job, self.texts = target, job, Texts([], [])

    def check(self) -> None:
        """Raise ConfigError or UnsupportedError if this kind does not support the target or the options."""

    @property
    def elements(self) -> int:
        """Return the number of elements per token that `read` keeps in host memory."""
        return 2 * self.target.config.hidden_size  # training concatenates them into a copy

    def read(self, engine: OfflineEngine, texts: Texts) -> None:
        """Read the target's states of the texts."""
        raise NotImplementedError

    def train(self) -> DraftInfo:
        """Train a drafter and write it to job.output."""
        raise NotImplementedError

    def _head(self) -> tuple[Tensor, Tensor | None]:
        """Return the target's head (V, C) and its bias on the device of the training."""
        device = self.target.device
        head, bias = self.target.head(torch.bfloat16 if device.type == "cuda" else torch.float32)
        return head.to(device), None if bias is None else bias.to(device)

    def _info(self, width: int, **trained: float) -> DraftInfo:
        job, plan, texts, config = self.job, self.job.plan, self.texts, self.target.config
        facts = {
            "tokens": texts.num_tokens,
            "prompts": len(texts.train),
            "held_back": len(texts.held_back),
            "epochs": plan.epochs,
            "temperature": job.temperature,
            "seed": plan.seed,
        }
        return DraftInfo(
            format=FORMAT,
            kind=job.kind,
            family=config.family,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            depth=plan.depth,
            width=width,
            target=self.target.digest,
            texts={**facts, **trained},
        )


class HeadsKind(Kind):
    """One-pass heads."""

    def read(self, engine: OfflineEngine, texts: Texts) -> None:
        self.texts = texts
        self._train, self._unseen = (read_hidden(engine, part) for part in (texts.train, texts.held_back))

    def train(self) -> DraftInfo:
        target, job, (head, bias) = self.target, self.job, self._head()
        embedding = (
            head if target.config.tied_head else target.matrix("model.wte", head.dtype).to(head.device)
        )
        states = states_of(self.texts.train, self._train)
        heads = train_heads(states, embedding, head, bias, job.plan, head.device)
        tensors = {name: x.to(job.dtype) for name, x in heads.state_dict().items()}
        rounded = heads.to(job.dtype).to(head.dtype)
        drafted = (
            (text, rounded.drafts(text, states, embedding, head, bias))
            for text, states in zip(self.texts.held_back, self._unseen)
        )
        info = self._info(job.plan.width_of(target.config.hidden_size))
        return _write(job, info, tensors, tokens_per_step(drafted, job.plan.depth))


class GlideKind(Kind):
    """A GLIDE layer over the cache of the target's last layer."""

    def check(self) -> None:
        if self.target.config.long_prompt_tokens:
            raise UnsupportedError(
                f"{self.job.model} rotates long prompts with other factors (longrope), and then there are no "
                f"drafts; wanted another model for --kind {GLIDE}"
            )

    @property
    def elements(self) -> int:
        config = self.target.config.largest_layer()
        return 2 * config.hidden_size + 2 * config.num_kv_heads * config.head_size

    def read(self, engine: OfflineEngine, texts: Texts) -> None:
        self.texts, state = texts, engine.engine.state
        layer, plan = self.target.config.num_layers - 1, self.job.plan
        width = plan.width or self.target.config.of_layer(layer).mlp_size
        self._layer = layer_fields(self._info(width), self.target.config, layer)
        torch.manual_seed(plan.seed)
        self._glide = Glide(self._layer, state.model.heads[layer], state.model.final_norm)
        self._train: list[Seen] = read_seen(engine, texts.train, layer)
        self._unseen: list[Seen] = read_seen(engine, texts.held_back, layer)

    def train(self) -> DraftInfo:
        job, (head, bias) = self.job, self._head()
        glide, depth = self._glide.to(head.device), job.plan.depth
        train_glide(glide, self.texts.train, self._train, head, bias, job.plan)
        tensors = {name: x.to(job.dtype) for name, x in glide.state_dict().items()}
        rounded = glide.to(job.dtype).to(head.dtype)
        drafted = (
            (text, glide_drafts(rounded, text, seen, depth, head, bias))
            for text, seen in zip(self.texts.held_back, self._unseen)
        )
        return _write(job, self._layer, tensors, tokens_per_step(drafted, depth))


class ModelKind(Kind):
    """A draft model of some of the target's layers."""

    def check(self) -> None:
        if self.target.checkpoint is None:
            raise ConfigError(
                f"{self.job.model} has converted weights; wanted the checkpoint that they were made from, "
                f"for --kind {MODEL}"
            )
        if self.job.layers >= self.target.config.num_layers:
            raise ConfigError(
                f"--layers {self.job.layers}; wanted less than the {self.target.config.num_layers} layers of "
                f"{self.job.model}"
            )
        if not self.target.checkpoint.has_reference:
            raise UnsupportedError(
                f"{self.job.model}: transformers has no model for it; wanted another --kind"
            )

    def read(self, engine: OfflineEngine, texts: Texts) -> None:
        self.texts = texts
        self._train = read_hidden(engine, texts.train)

    def train(self) -> DraftInfo:
        job, checkpoint, depth = self.job, self.target.checkpoint, self.job.plan.depth
        assert checkpoint is not None
        model = cut_model(checkpoint, job.layers)
        train_model(model, self.texts.train, self._train, job.plan, self.target.device)
        drafted = ((text, model_drafts(model, text, depth)) for text in self.texts.held_back)
        rates = tokens_per_step(drafted, depth)
        save_model(model, checkpoint, job.output, job.dtype)
        info = _with_rates(self._info(self.target.config.hidden_size, layers=job.layers), rates)
        write_info(job.output, info)
        return info


KINDS: dict[str, type[Kind]] = {HEADS: HeadsKind, MODEL: ModelKind, GLIDE: GlideKind}


def _write(job: Job, info: DraftInfo, tensors: Mapping[str, Tensor], rates: list[float]) -> DraftInfo:
    info = _with_rates(info, rates)
    write_draft(job.output, info, tensors)
    return info


def _with_rates(info: DraftInfo, rates: list[float]) -> DraftInfo:
    return replace(info, tokens_per_step=[round(rate, 4) for rate in rates])
