"""Both styles of log probabilities where a character has several tokens; texts are transformers' decoding."""

from __future__ import annotations

import numpy as np

from tests.checkpoints import tiny_tokenizer
from tridecode.backend.front.logprobs import chat_logprobs, completion_logprobs
from tridecode.backend.front.prompt_scores import echoed_logprobs
from tridecode.backend.service.prompt_scores import PromptScores
from tridecode.backend.text.detokenizer import TokenizerView
from tridecode.backend.text.token_texts import TextOffsets, TokenTexts
from tridecode.backend.wire.messages import TopLogProbs

TEXT = "a 港é."
TOKENIZER = tiny_tokenizer()
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)
TEXTS = TokenTexts(TokenizerView(TOKENIZER.backend_tokenizer, True))
STEPS = [(token, TopLogProbs(-0.5, 1, [token, 300, 301], [-0.5, -1.0, -2.0])) for token in IDS]


def characters_before(count: int) -> int:
    """Complete characters of the text of the first tokens."""
    return len(TOKENIZER.decode(IDS[:count]).rstrip("\ufffd"))


def test_chats_have_the_bytes_of_each_token() -> None:
    found = chat_logprobs(STEPS, 2, TEXTS).content
    assert bytes(byte for one in found for byte in one.bytes or ()) == TEXT.encode("utf-8")
    parts = [one.token for one in found if one.token.startswith("\\x")]
    assert "".join(parts) == "\\xe6\\xb8\\xaf\\xc3\\xa9" and len(parts) == 5
    assert all([top.token for top in one.top_logprobs][0] == one.token for one in found)


def test_completions_have_the_place_of_each_token_however_they_are_cut() -> None:
    wanted = [7 + characters_before(count) for count in range(len(IDS))]
    for cut in range(len(IDS) + 1):
        offsets = TextOffsets(TEXTS, 7)
        found = [completion_logprobs(steps, 2, TEXTS, offsets) for steps in (STEPS[:cut], STEPS[cut:])]
        assert found[0].text_offset + found[1].text_offset == wanted
    whole = completion_logprobs(STEPS, 2, TEXTS, TextOffsets(TEXTS))
    assert [token for token in whole.tokens if token.startswith("bytes:")] == [
        f"bytes:\\x{byte:02x}" for byte in "港é".encode()
    ]
    assert whole.top_logprobs is not None
    assert all(top[token] == -0.5 for top, token in zip(whole.top_logprobs, whole.tokens))


def test_a_scored_prompt_has_its_places_in_the_echo() -> None:
    scores = PromptScores(IDS, 1, 400)
    logits = np.random.default_rng(0).normal(size=(len(IDS), 400)).astype("<f4")
    scores.add(logits.tobytes())
    found = echoed_logprobs(scores, TEXTS, len(TEXT), 1)
    assert found.text_offset == [characters_before(count) for count in range(len(IDS))]
    # one character less: the echo lacks the space that a decoder strips from the first word
    shifted = echoed_logprobs(scores, TEXTS, len(TEXT) - 1, 1)
    assert shifted.text_offset == [max(0, place - 1) for place in found.text_offset]
    log_probs = logits.astype(np.float64)
    log_probs -= np.log(np.exp(log_probs).sum(1, keepdims=True))
    assert found.token_logprobs[0] is None
    np.testing.assert_allclose(
        found.token_logprobs[1:], log_probs[np.arange(len(IDS) - 1), IDS[1:]], rtol=1e-6
    )


def test_each_token_of_a_prompt_has_its_rank_and_alternatives() -> None:
    """vLLM's form, whatever the parts in which the logits come."""
    logits = np.random.default_rng(1).normal(size=(len(IDS), 400)).astype("<f4") * 3
    scores = PromptScores(IDS, 5, 400)
    for part in np.array_split(logits, 4):
        assert not scores.complete
        scores.add(part.tobytes())
    assert scores.complete
    wanted = logits.astype(np.float64)
    wanted -= np.log(np.exp(wanted).sum(1, keepdims=True))
    first, *others = scores.alternatives(TEXTS, 2)
    assert first is None and len(others) == len(IDS) - 1
    for token, row, found in zip(IDS[1:], wanted, others):
        best = np.argsort(-row)
        rank = int(np.flatnonzero(best == token)[0]) + 1
        names = dict.fromkeys([token, *best[:2].tolist()])
        assert list(found) == [str(one) for one in names]
        assert found[str(token)]["rank"] == rank
        for one in names:
            entry = found[str(one)]
            assert abs(entry["logprob"] - row[one]) < 1e-5 and entry["decoded_token"] == TEXTS[one]
