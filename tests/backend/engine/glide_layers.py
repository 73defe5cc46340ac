"""GLIDE layers of tiny models, and an independent one in plain PyTorch with the paper's names."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.backend.engine.draft_heads import greedy_texts
from tests.backend.engine.offline_models import offline_engine
from tests.backend.hf_models import model_config
from tridecode.backend.weights.draft_files import FORMAT, GLIDE, DraftInfo, TrainedDraft, layer_fields
from tridecode.tools.train_draft.glide import Glide, read_seen, train_glide
from tridecode.tools.train_draft.texts import Text
from tridecode.tools.train_draft.training import Plan


def random_glide(model: nn.Module, depth: int = 3, width: int = 40, seed: int = 5) -> TrainedDraft:
    """A GLIDE layer whose attentions and MLP all matter."""
    config, generator = model_config(model.config), torch.Generator().manual_seed(seed)
    info = DraftInfo(FORMAT, GLIDE, config.family, config.hidden_size, config.vocab_size, depth, width)
    info = layer_fields(info, config, config.num_layers - 1)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in info.shapes.items()}
    return TrainedDraft(
        info, {name: x + 1 if name.endswith("norm.weight") else x for name, x in tensors.items()}
    )


def trained_glide(
    model: nn.Module,
    texts: list[Text],
    depth: int = 3,
    epochs: int = 120,
    device: str = "cpu",
    rate: float = 5e-3,
) -> TrainedDraft:
    """A GLIDE layer that knows most of these texts by heart."""
    longest = max(len(text.ids) for text in texts) + 1
    sizes = dict(max_sequences=8, max_step_tokens=64, max_sequence_tokens=longest, prefix_cache=False)
    offline = offline_engine(model, device, keep_logits=False, **sizes)
    info, state = random_glide(model, depth, 2 * model.config.hidden_size).info, offline.engine.state
    torch.manual_seed(0)
    glide = Glide(info, state.model.heads[info.layer], state.model.final_norm).to(device)
    seen = read_seen(offline, texts, info.layer)
    head = model.get_output_embeddings().weight.detach().to(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other at every tiny product
    try:
        train_glide(glide, texts, seen, head, None, Plan(depth, epochs=epochs, batch=1024, rate=rate))
    finally:
        torch.set_num_threads(threads)
    return TrainedDraft(info, {name: x.detach().cpu() for name, x in glide.state_dict().items()})


@lru_cache(maxsize=4)
def known_model(make, prompts: tuple[tuple[int, ...], ...], new: int):
    """A model, its greedy answers to prompts, and a GLIDE layer that knows most of them."""
    model = make()
    texts = greedy_texts(model, [list(prompt) for prompt in prompts], new)
    return model, texts, trained_glide(model, texts)


class RmsNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


class SelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)


class CrossAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, head_dim: int):
        super().__init__()
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class PaperGlide(nn.Module):
    """The draft model M_D of "GLIDE with a CAPE" with a target M_T of transformers, in float64: a decoder
    layer whose cross-attention reads the keys and values of the target's last layer. One token at a time,
    without a cache of its own; written from the paper, with the names of Colossal-Inference's module."""

    def __init__(self, target: nn.Module, trained: TrainedDraft):
        super().__init__()
        info, self.target = trained.info, target.double()
        self.heads, self.kv_heads, self.head_dim = info.num_heads, info.num_kv_heads, info.head_size
        hidden, sizes = info.hidden_size, (info.num_heads, info.num_kv_heads, info.head_size)
        self.input_layernorm = RmsNorm(hidden)
        self.self_attn = SelfAttention(hidden, *sizes)
        self.cross_attn_layernorm = RmsNorm(hidden)
        self.cross_attn = CrossAttention(hidden, info.num_heads, info.head_size)
        self.post_attention_layernorm = RmsNorm(hidden)
        self.mlp = MLP(hidden, info.width)
        mine = {name: x.double() for name, x in trained.tensors.items()}
        missing, unexpected = self.double().load_state_dict(mine, strict=False)
        assert not unexpected and all(name.startswith("target.") for name in missing)

    def drafts(self, ids: list[int], seen: int, count: int) -> tuple[list[int], Tensor]:
        """Return the most likely tokens behind `ids`, and their logits (count, V). seen: tokens in the
        target's cache, from which M_D glimpses: all but those of ids[seen:]."""
        found, logits = list(ids), []
        with torch.inference_mode():
            cache = self.target(torch.tensor([ids[:seen]]), use_cache=True).past_key_values
            keys, values = cache.layers[-1].keys[0], cache.layers[-1].values[0]  # (K, seen, D)
            for _ in range(count):
                logits.append(self._logits(found, keys, values))
                found.append(int(logits[-1].argmax()))
        return found[len(ids) :], torch.stack(logits)

    def _logits(self, ids: list[int], target_keys: Tensor, target_values: Tensor) -> Tensor:
        base, length = self.target.base_model, len(ids)
        x = self._embedded(ids)  # (L, C)
        h = self.input_layernorm(x)
        q, k, v = (
            self._split(linear(h))
            for linear in (self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj)
        )
        q, k = self._rotated(q, length), self._rotated(k, length)
        x = x[-1] + self.self_attn.o_proj(self._attend(q[:, -1], k, v))
        q = self._split(self.cross_attn.q_proj(self.cross_attn_layernorm(x))[None])
        q = self._rotated(q, length)[:, 0]
        x = x + self.cross_attn.o_proj(self._attend(q, target_keys, target_values))
        x = x + self.mlp(self.post_attention_layernorm(x))
        norm = base.norm if hasattr(base, "norm") else base.ln_f
        return self.target.get_output_embeddings()(norm(x))

    def _embedded(self, ids: list[int]) -> Tensor:
        base, tokens = self.target.base_model, torch.tensor(ids)
        x = self.target.get_input_embeddings()(tokens)
        if hasattr(base, "wpe"):  # GPT-2: learned positions
            return x + base.wpe(torch.arange(len(ids)))
        if hasattr(base, "word_embeddings_layernorm"):  # BLOOM
            return base.word_embeddings_layernorm(x)
        return x

    def _split(self, x: Tensor) -> Tensor:
        """(T, n * D) to (n, T, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def _rotated(self, x: Tensor, length: int) -> Tensor:
        """Rotate (n, T, D), the last T of `length` positions, if the target has rotary positions."""
        rotary = getattr(self.target.base_model, "rotary_emb", None)
        if rotary is None:
            return x
        positions = torch.arange(length - x.shape[1], length)[None]
        cos, sin = rotary(x[None], positions)
        return apply_rotary_pos_emb(x[None], x[None], cos, sin)[0][0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one query (H, D) over keys and values (K, L, D); (H * D,)."""
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 0) for part in (k, v))
        scores = torch.einsum("hd,hld->hl", q, k) / self.head_dim**0.5
        if self.target.config.model_type == "bloom":  # ALiBi: slopes 2^(-8 / n), ... of a power of two
            slopes = torch.tensor(SLOPES[self.heads], dtype=torch.float64)
            scores = scores + slopes[:, None] * torch.arange(k.shape[1])
        return torch.einsum("hl,hld->hd", scores.softmax(-1), v).flatten()


#: of Press et al. (arXiv 2108.12409), by number of heads
SLOPES = {
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    5: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
}
