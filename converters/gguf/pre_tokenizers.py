"""Rules that the name of a pre-tokenizer, tokenizer.ggml.pre, implies in llama.cpp.

A GGUF file of a byte-level BPE has vocabulary and merges, but the regular expressions that split a text into
words, and two switches, are known by name only. Source: llama.cpp b11549, src/llama-vocab.cpp, llama_vocab::
impl::load and llm_tokenizer_bpe. Names of encoders and those with rules in code (kimi-k2, afmoe, gemma4 …)
are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DIGITS = "[0-9][0-9][0-9]"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)


def _words(number: str, rest: str = r"[\r\n]*") -> str:
    """Llama 3's expression. number: for digits; rest: what belongs to punctuation before it."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+{rest}|{_LINES}"


def _cased(ending: str, number: str) -> str:
    """GPT-4o's expression, words by their capitals. ending: after a word."""
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
    words = f"{lead}{upper}*{lower}+{ending}|{lead}{upper}+{lower}*{ending}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


@dataclass(frozen=True)
class PreTokenizer:
    """splits: regular expressions that split a text in sequence; text between matches is kept.

    ignore_merges: a word of the vocabulary is one token even if no merges lead to it. add_bos: the default
    of tokenizer.ggml.add_bos_token.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_GPT2_WORDS = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_ENDING, _THREE = f"{_CONTRACTIONS}?", r"\p{N}{1,3}"
_GPT4O = PreTokenizer((_cased(_ENDING, _THREE),))
_DEEPSEEK3 = PreTokenizer((_THREE, _CJK, _DEEPSEEK_WORDS))

#: the rules that llama.cpp takes for a file without the key
DEFAULT = "default"
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    DEFAULT: PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _DIGITS)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_words(_THREE),))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("solar-open", "grok-2", "f2llmv2"), _QWEN2),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), _GPT2_WORDS),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "granite-docling"), _GPT2_WORDS),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _SINGLE_DIGITS),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _DIGITS)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "tekken": PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "minicpm5": PreTokenizer((_THREE, _words(r"\p{N}+")), ignore_merges=True),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",)
    ),
}
