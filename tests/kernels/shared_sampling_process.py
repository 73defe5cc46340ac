"""Ranks of tests/kernels/test_shared_sampling.py, in processes of their own: each computes the tokens of one
rank from the whole logits, with the same kernel file, and compares its own."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from tests.kernels.peer_process import make
from tests.kernels.sampling_states import SLOTS, cloned, cut, random_state
from tridecode.backend.weights.layout import VocabShare
from tridecode.kernels.sampling_state import SamplingState

#: next to vocab - 1 and more: greedy, of few and of more than are listed as candidates
TOP_KS = (0, 0, 0, 1, 2, 5, 40, 300, 1100, 3000)


#: states are made here: on a GPU each of their many small copies would wait while the peers' kernels spin
CPU = torch.device("cpu")


def moved(state: SamplingState, device: torch.device) -> SamplingState:
    return SamplingState(*(tensor.to(device) for tensor in state.tensors()))


class Rank:
    """Cuda of this process, its peers, and what one of several ranks has of a vocabulary."""

    def __init__(self, rank: int, world: int, exchange, limit_s: float = 60.0):
        from tridecode.kernels.cuda import Cuda

        self.rank, self.world, self.exchange = rank, world, exchange
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.ops = Cuda(self.device)
        self.ops.reserve(64, 64, SLOTS, 64, 262144)
        self.peers = make(rank, world, exchange, 4, 64, torch.float32, None, limit_s, SLOTS, self.ops)

    def share(self, vocab: int) -> VocabShare:
        return VocabShare(vocab, self.rank, self.world)

    def results(self, rows: int) -> dict[str, Tensor]:
        return {
            "tokens": torch.full((rows,), -7, dtype=torch.int32, device=self.device),
            "log_probs": torch.full((rows,), -7.0, device=self.device),
        }

    def whole(self, logits: Tensor, slots: Tensor, state: SamplingState) -> dict[str, Tensor]:
        found = self.results(len(slots))
        self.ops.sample(logits.clone(), slots, state, **found)
        return found

    def shared(self, mine: Tensor, slots: Tensor, state: SamplingState, vocab: int, found=None):
        """mine: (R, size), overwritten."""
        from tridecode.kernels.cuda_sampling import SharedIds

        share, found = self.share(vocab), found or self.results(len(slots))
        ids = SharedIds(share.first, share.count, vocab)
        self.ops.sample_shared(mine, slots, state, ids, self.peers, **found)
        return found

    def compare(self, logits: Tensor, slots: list[int], state: SamplingState) -> str:
        """Return the first difference between the two; "" if they are equal. logits, state: on the CPU."""
        vocab, at = logits.shape[1], torch.tensor(slots, dtype=torch.int32, device=self.device)
        share, alone = self.share(vocab), moved(state, self.device)
        own = moved(cloned(state, share), self.device)
        logits = logits.to(self.device)
        wanted, found = self.whole(logits, at, alone), self.shared(cut(logits, share), at, own, vocab)
        wrong = self.differences(wanted, found, alone, own, vocab)
        rows = (wanted["tokens"] != found["tokens"]).nonzero().flatten().tolist()
        settings = [
            {name: float(state.column(name)[slots[row]]) for name in ("top_k", "top_p_now", "temperature")}
            for row in rows[:3]
        ]
        return f"vocab {vocab}: {wrong} {settings if rows else ''}" if wrong else ""

    def differences(self, wanted, found, alone: SamplingState, own: SamplingState, vocab: int) -> str:
        wrong = []
        if wanted["tokens"].tolist() != found["tokens"].tolist():
            wrong.append(f"tokens {found['tokens'].tolist()}, wanted {wanted['tokens'].tolist()}")
        error = float((wanted["log_probs"] - found["log_probs"]).abs().max())
        if not error < 2e-5:
            wrong.append(f"log_probs off by {error}")
        for name in ("slots", "last_tokens", "history"):
            if not torch.equal(getattr(alone, name), getattr(own, name)):
                wrong.append(name)
        if not torch.equal(own.counts, cut(alone.counts, self.share(vocab), 0)):
            wrong.append("counts")
        if self.peers.lost is not None:
            wrong.append(f"lost {self.peers.lost}")
        return ", ".join(wrong)

    def close(self) -> None:
        self.exchange(b"done")
        self.peers.close()


def normal(random: np.random.Generator, scale: float, *shape: int) -> Tensor:
    return torch.from_numpy(random.normal(0, scale, shape).astype(np.float32))


@torch.inference_mode()
def all_settings(rank: int, world: int, exchange) -> str:
    """Mixed rows. 9 and 10 ids leave ranks without any; 1003 and 50257 leave padding on the last one."""
    held, wrong = Rank(rank, world, exchange), []
    for vocab, rows, rounds in ((1000, 48, 6), (1003, 48, 4), (50257, 40, 6), (9, 30, 3), (10, 30, 3)):
        random = np.random.default_rng(vocab)
        for scale in np.linspace(0.5, 6.0, rounds):
            state = random_state(CPU, vocab, SLOTS, random, TOP_KS)
            slots = random.permutation(SLOTS)[:rows]
            slots[random.random(rows) < 0.1] = -1
            wrong.append(held.compare(normal(random, scale, rows, vocab), slots.tolist(), state))
    held.close()
    return "; ".join(filter(None, wrong))[:1500]


@torch.inference_mode()
def one_setting(rank: int, world: int, exchange) -> str:
    """Rows of one kind at a time, with listed candidates or without."""
    held, wrong = Rank(rank, world, exchange), []
    kinds = [dict(top_k=k, top_p=p) for k, p in ((0, 0.9), (0, 0.05), (50, 1.0), (50, 0.8), (1500, 0.95))]
    kinds += [dict(top_k=k, top_p=1.0, min_p=0.0, typical_p=0.6) for k in (0, 50)]
    for number, kind in enumerate([*kinds, dict(top_k=1), dict(top_k=0, top_p=1.0)]):
        for scale in (0.01, 2.0):
            random = np.random.default_rng(number)
            always = dict(temperature=1.0, return_log_probs=1, **kind)
            state = random_state(CPU, 128256, SLOTS, random, **always)
            text = held.compare(normal(random, scale, 16, 128256), list(range(16)), state)
            wrong.append(f"{kind} x {scale}: {text}" if text else "")
    held.close()
    return "; ".join(filter(None, wrong))[:1500]


@torch.inference_mode()
def special_numbers(rank: int, world: int, exchange) -> str:
    """Ties across ranks; NaN and infinities; rows in which one rank, or all, have no possible id."""
    held, wrong = Rank(rank, world, exchange), []
    random = np.random.default_rng(3)
    for vocab in (40, 1003):
        logits = normal(random, 2.0, SLOTS, vocab)
        logits[0:8] = logits[0:8].round()
        logits[8:10] = 0.0
        logits[10:12, 1::2] = -0.0
        for row, at in enumerate((0, 1, 2, 3, vocab - 1, vocab // 2)):
            logits[12 + row, at] = torch.nan
            logits[18 + row, at] = torch.from_numpy(np.array([0xFFC00000], np.uint32).view(np.float32))
            logits[24 + row, at] = torch.inf
        logits[30:34] = -torch.inf
        logits[32, 1], logits[33, vocab - 2] = 0.0, -3.0
        logits[34:36, : vocab // 2], logits[36:38, vocab // 2 :] = -torch.inf, -torch.inf
        for kind in (dict(top_k=1), dict(top_k=7), dict(top_k=0, top_p=0.8), dict(top_k=0, top_p=1.0), {}):
            state = random_state(CPU, vocab, SLOTS, random, TOP_KS, **kind)
            state.column("num_bad_words")[:] = 0
            state.column("min_tokens")[:] = 0
            state.column("no_repeat_ngram_size")[:] = 0
            wrong.append(held.compare(logits, list(range(SLOTS)), state))
            state.column("masked")[:] = 0  # a mask hides numbers that are none
            found = held.shared(
                cut(logits[12:34].to(held.device), held.share(vocab)),
                torch.arange(12, 34, dtype=torch.int32, device=held.device),
                moved(cloned(state, held.share(vocab)), held.device),
                vocab,
            )["tokens"].tolist()
            wrong.append("" if found[:18] == [-1] * 18 else "NaN or inf gave a token")
    held.close()
    return "; ".join(filter(None, wrong))[:1500]


@torch.inference_mode()
def replayed(rank: int, world: int, exchange) -> str:
    """A graph of three steps, replayed between launches of other numbers of rows; the state continues."""
    held, vocab = Rank(rank, world, exchange), 5003
    random = np.random.default_rng(7)
    share = held.share(vocab)
    alone = random_state(CPU, vocab, SLOTS, random, TOP_KS, top_p_decay=0.95)
    alone, own = moved(alone, held.device), moved(cloned(alone, share), held.device)
    logits = normal(random, 3.0, 16, vocab).to(held.device)
    mine = cut(logits, share)
    slots = torch.tensor([*range(20, 33), -1, 2, -1], dtype=torch.int32, device=held.device)
    outs = [held.results(16) for _ in range(3)]
    buffers = [mine.clone() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for buffer, out in zip(buffers, outs):
            buffer.copy_(mine)
            held.shared(buffer, slots, own, vocab, out)
    for turn in range(6):
        for out in outs:
            out["tokens"].fill_(-7), out["log_probs"].fill_(-7.0)
        graph.replay()
        for step, out in enumerate(outs):
            wanted = held.whole(logits, slots, alone)
            pair = out["tokens"].tolist(), wanted["tokens"].tolist()
            if pair[0] != pair[1]:
                return f"replay {turn}, step {step}: {pair[0]}, wanted {pair[1]}"
        few = slots[: 1 + turn]
        wanted = held.whole(logits[: 1 + turn], few, alone)
        found = held.shared(mine[: 1 + turn].clone(), few, own, vocab)
        text = held.differences(wanted, found, alone, own, vocab)
        if text:
            return f"after replay {turn}: {text}"
    held.close()
    return ""


@torch.inference_mode()
def abandoned(rank: int, world: int, exchange) -> str:
    """Rank 1 does not come: rank 0 ends within the limit, names it, gives ids, and does not wait again."""
    held, vocab, found = Rank(rank, world, exchange, limit_s=0.5), 1003, ""
    if rank == 0:
        random = np.random.default_rng(8)
        state = random_state(CPU, vocab, SLOTS, random, TOP_KS)
        own = moved(cloned(state, held.share(vocab)), held.device)
        mine = cut(normal(random, 2.0, 16, vocab), held.share(vocab))
        slots = torch.arange(16, dtype=torch.int32, device=held.device)
        mine = mine.to(held.device)
        torch.cuda.synchronize()
        started = time.monotonic()
        for _ in range(20):
            tokens = held.shared(mine.clone(), slots, own, vocab)["tokens"]
        torch.cuda.synchronize()
        took = time.monotonic() - started
        if held.peers.lost != 1 or not 0.4 < took < 3.0 or not -1 <= int(tokens.min()) < vocab:
            found = f"lost {held.peers.lost} after {took:.2f} s, tokens {tokens.tolist()}"
    exchange(b"done")
    return found
