"""The state of one rank on its device: weights, KV cache, workspace, sampling state, adapters."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tridecode.backend import models
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.adapters.place import modules_of
from tridecode.backend.engine.adapters.store import AdapterStore
from tridecode.backend.engine.adapters.tables import AdapterTables, fits
from tridecode.backend.engine.device.drafters.draft_weights import DraftModel, draft_tokens
from tridecode.backend.engine.device.drafters.glide_layer import mlp_columns
from tridecode.backend.engine.device.file_weights import DTYPES
from tridecode.backend.engine.host_tier.store import HostStore
from tridecode.backend.engine.prompt_tables.store import PromptPlace, PromptStore, prompt_limits
from tridecode.backend.engine.ranks.parallel import Ranks
from tridecode.backend.models.context import Workspace
from tridecode.backend.models.decoder import Decoder
from tridecode.backend.models.prompt_ini import PromptSection
from tridecode.backend.models.weights import Weights
from tridecode.backend.weights.draft_files import GLIDE, TrainedDraft
from tridecode.backend.weights.layout import share_size, stage_layers
from tridecode.backend.wire.prompt_learning import NO_PROMPT, default_start_id
from tridecode.kernels.formats.kv_rounding import CACHE_DTYPES
from tridecode.kernels.operands import CacheLayer
from tridecode.kernels.ops import Ops
from tridecode.kernels.sampling_state import SamplingState
from tridecode.kernels.top_log_probs import TopRows


class DeviceState:
    """The model of one rank and the memory that steps read and write.

    config: resolved (resolved_settings.resolve). vocab: the ids of this rank if the tensor ranks share the
    vocabulary, else None. adapters, prompts, prompt_limits: initially empty, replaced by loading.py.
    draft_layers: shape of a block, (2, kv heads, tokens, head size), for each cache layer of the drafter;
    `caches` has these layers after the model's. draft, trained: the draft model or the trained drafter, if
    any; `trained` until the engine is made.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        weights: Weights,
        ops: Ops,
        ranks: Ranks,
        device: torch.device,
        draft: tuple[ModelConfig, Weights] | None = None,
        trained: TrainedDraft | None = None,
    ):
        assert config.max_sequence_tokens is not None and config.max_step_tokens is not None
        self.model_config, self.config, self.ranks, self.device = model, config, ranks, device
        self.dtype = DTYPES[config.data_type]
        self.ops = ops
        self.model = models.family(model.family).model(model, weights, ranks, config.max_sequence_tokens)
        self.adapters: AdapterStore | None = None
        self.adapter_tables = self._adapter_tables(weights)
        none = PromptSection(NO_PROMPT, default_start_id(model.vocab_size, model.end_id), [])
        self.prompt_limits = prompt_limits(none, model, self.dtype, None)
        self.prompts = PromptStore(self.prompt_place())
        self.vocab = self.model.vocab
        self.is_last_stage = ranks.stage == ranks.num_stages - 1
        rows, longest = config.slots, config.max_sequence_tokens
        columns = model.vocab_size if self.vocab is None else self.vocab.size
        self.work = Workspace.allocate(
            model, config.max_step_tokens, rows, ranks.tensor_size, self.dtype, device, columns
        )
        self.sampling = SamplingState.allocate(
            rows, longest, columns, config.max_bad_word_tokens, device, model.vocab_size
        )
        self.trained = trained
        self.draft = None if draft is None else DraftModel(*draft, ranks, config, self.work)
        has_turns = draft is not None or (trained is not None and trained.info.kind == GLIDE)
        most = draft_tokens(config) if has_turns else config.max_step_tokens
        ops.reserve(most, self._max_columns(), rows, longest, columns, self._context_bytes())
        #: buffers of the most likely tokens, if each step computes them; None: see device/parts/top_tokens.py
        self.top: TopRows | None = None
        if ops.has_top_log_probs and self._samples_alone:
            self.top = TopRows.allocate(rows, config.max_bad_word_tokens, columns, device)
        self.host: HostStore | None = None  # set by opening.open_store if there is a host tier
        self.draft_layers: list[tuple[int, int, int, int]] = []
        self.num_blocks = 0
        self.caches: list[CacheLayer] = []

    @property
    def first_id(self) -> int:
        """Return the id of the first column of logits and counts on this rank."""
        return 0 if self.vocab is None else self.vocab.first

    def _adapter_tables(self, weights: Weights) -> AdapterTables | None:
        """Return the kernels' tables of adapters, if adapters are served and kernels add them."""
        config, linears = self.config, list(weights.linears.values())
        if config.lora_path == "none" or config.batch_invariant or not self.ops.fuses_adapters:
            return None
        assert config.max_step_tokens is not None
        sizes = config.max_loras, config.slots, config.max_step_tokens
        ring = max(4, self.ranks.num_stages + 2)
        if not fits(linears):
            return None
        ranks = config.max_lora_rank * max(modules_of(weights.specs, names) for names in weights.linears)
        return AdapterTables(linears, *sizes, 2 * ring, self.device, ranks)  # a step may load twice

    @property
    def _samples_alone(self) -> bool:
        """Return whether sampling ranks have the logits of the whole vocabulary; the same on all ranks."""
        return self.ranks.tensor_size == 1 or (self.vocab is None and self.ranks.num_stages == 1)

    def prompt_place(self) -> PromptPlace:
        scale = self.model.embedding_scale
        return PromptPlace(self.model_config, self.ranks, self.dtype, self.device, scale)

    def allocate_cache(
        self,
        num_blocks: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        with_drafter: bool = True,
    ) -> list[CacheLayer]:
        """Return empty caches for all layers of this stage. device: default: this rank's. dtype: default:
        that of kv_cache_dtype. with_drafter: append the drafter's layers.
        """
        dtype = dtype or CACHE_DTYPES.get(self.config.kv_cache_dtype, self.dtype)
        shapes = self._block_shapes() + (self.draft_layers if with_drafter else [])
        return [_cache_layer((num_blocks, *shape), dtype, device or self.device) for shape in shapes]

    def block_bytes(self) -> int:
        """Return the bytes of one block in all layers of this stage, with its scales."""
        layers = self.allocate_cache(1, torch.device("meta"))
        return sum(tensor.nbytes for layer in layers for tensor in layer.tensors)

    def _block_shapes(self) -> list[tuple[int, int, int, int]]:
        """Return (2, kv heads, tokens, head size) of a block, for each layer of this stage."""
        tokens, size = self.config.block_tokens, self.ranks.tensor_size
        stage = stage_layers(self.model_config.num_layers, self.ranks.stage, self.ranks.num_stages)
        layers = [self.model_config.of_layer(layer) for layer in stage]
        return [(2, share_size(layer.num_kv_heads, size), tokens, layer.head_size) for layer in layers]

    def _max_columns(self) -> int:
        """Return the columns of the widest GEMM input on this rank.

        Normalised inputs count twice: quantising them
        takes one byte of scratch per column.
        """
        most, size = 0, self.ranks.tensor_size
        for decoder in self._decoders():
            model = decoder.config.largest_layer()
            heads = model.num_heads // size + 2 * share_size(model.num_kv_heads, size)
            mlp = max(max(layer.up.weight.shape[0], layer.down.weight.shape[1]) for layer in decoder.layers)
            most = max(most, heads * model.head_size, mlp, 2 * model.hidden_size)
        if self.trained is not None and self.trained.info.kind == GLIDE:
            most = max(most, mlp_columns(self.trained.info, size))
        return most

    def _context_bytes(self) -> int:
        """Return the bytes of the longest sequence's dequantised keys and values in one layer; 0 without an
        8-bit cache.
        """
        assert self.config.max_sequence_tokens is not None
        if self.config.kv_cache_dtype not in CACHE_DTYPES:
            return 0
        blocks = -(-self.config.max_sequence_tokens // self.config.block_tokens)
        shapes = self._block_shapes()
        if self.draft is not None:
            shapes += self.draft.block_shapes(self.config.block_tokens, self.ranks.tensor_size)
        return blocks * max(math.prod(shape) for shape in shapes) * self.dtype.itemsize

    def _decoders(self) -> list[Decoder]:
        return [self.model] if self.draft is None else [self.model, self.draft.model]


def _cache_layer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> CacheLayer:
    """Return an empty cache. shape: (N, 2, K, P, D); 8-bit dtypes get scales."""
    blocks = _zeros(shape, dtype, device)
    return CacheLayer(blocks, _zeros(shape[:-1], torch.float32, device) if dtype.itemsize == 1 else None)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On the CPU their pages take no memory until they are written; torch.zeros would touch
    them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    words = np.zeros(shape, {1: np.int8, 2: np.int16, 4: np.int32}[dtype.itemsize])
    return torch.from_numpy(words).view(dtype)
