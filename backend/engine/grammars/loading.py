"""Makes the Grammars of an engine from the tokenizer of its repository."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence as Items
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.engine.grammars.checker import GrammarChecker
from tridecode.backend.engine.grammars.service import CONNECTIONS, Grammars
from tridecode.backend.engine.grammars.vocabulary import read_vocabulary

log = logging.getLogger("tridecode.engine")
_MOST_THREADS = 8


def load_grammars(
    folder: Path | None,
    vocab_size: int,
    end_ids: Items[int],
    mask_cpu_ms: float = 20.0,
    grammar_cpu_ms: float = 150.0,
) -> Grammars:
    """Return the grammars of an engine. Without a usable tokenizer they refuse all requests with the reason.

    folder: contains tokenizer.json. vocab_size, end_ids: the model's; ids of -1 are ignored. mask_cpu_ms,
    grammar_cpu_ms: see EngineConfig.
    """
    if folder is None or not (folder / "tokenizer.json").is_file():
        return Grammars(fault="no model of this engine's repository names a tokenizer (tokenizer_dir)")
    try:
        from tridecode.backend.engine.grammars.guidance import Guidance
    except ImportError as error:
        return Grammars(fault=f"llguidance cannot be imported: {error}")
    try:
        vocabulary, encode = read_vocabulary(folder, vocab_size, end_ids)
        if not vocabulary.end_ids:
            return Grammars(fault="this model has no token that ends a text (end_id in config.ini)")
        threads = min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
        compiler = Guidance(vocabulary, encode, threads)
    except ConfigError as error:
        return Grammars(fault=str(error))
    except Exception as error:  # of the library
        log.warning("no answer can obey a grammar: %s", error)
        return Grammars(fault=f"its tokenizer cannot be used for grammars: {error}")
    checker = GrammarChecker(folder, vocab_size, vocabulary.end_ids, grammar_cpu_ms, CONNECTIONS)
    return Grammars(compiler, vocab_size, vocabulary.end_ids, mask_cpu_ms / 1e3, threads, checker=checker)
