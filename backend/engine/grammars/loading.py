"""Makes the Grammars of an engine from the tokenizer of its repository."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence as Items
from pathlib import Path

from tridecode.backend.base.errors import ConfigError, TridecodeError
from tridecode.backend.engine.grammars.checker import GrammarChecker
from tridecode.backend.engine.grammars.service import Grammars
from tridecode.backend.engine.grammars.vocabulary import read_vocabulary
from tridecode.backend.engine.grammars.warm_up import warm_up

log = logging.getLogger("tridecode.engine")
_MOST_MASK_THREADS, _MOST_COMPILE_THREADS = 8, 4


def load_grammars(
    folder: Path | None,
    vocab_size: int,
    end_ids: Items[int],
    mask_cpu_ms: float = 20.0,
    grammar_cpu_ms: float = 150.0,
    start: bool = False,
) -> Grammars:
    """Return the grammars of an engine. Without a usable tokenizer they refuse all requests with the reason.

    folder: contains tokenizer.json. vocab_size, end_ids: the model's; ids of -1 are ignored. mask_cpu_ms,
    grammar_cpu_ms: see EngineConfig. start: start the checker's processes now, so that they read the
    vocabulary at the same time; otherwise the first grammar starts them.
    """
    if folder is None or not (folder / "tokenizer.json").is_file():
        return Grammars(fault="no model of this engine's repository names a tokenizer (tokenizer_dir)")
    try:
        from tridecode.backend.engine.grammars.guidance import Guidance
    except ImportError as error:
        return Grammars(fault=f"llguidance cannot be imported: {error}")
    cpus = os.cpu_count() or 1
    mask_threads = min(_MOST_MASK_THREADS, max(1, cpus // 2))
    compile_threads = min(_MOST_COMPILE_THREADS, max(2, cpus // 4))
    checker = GrammarChecker(folder, vocab_size, end_ids, grammar_cpu_ms, compile_threads)
    if start:
        _start(checker)
    try:
        vocabulary, encode = read_vocabulary(folder, vocab_size, end_ids)
        if vocabulary.end_ids:
            compiler = Guidance(vocabulary, encode, mask_threads)
            warm_up(compiler, vocab_size)
            return Grammars(
                compiler,
                vocab_size,
                vocabulary.end_ids,
                mask_cpu_ms / 1e3,
                mask_threads,
                checker=checker,
                compile_threads=compile_threads,
            )
        fault = "this model has no token that ends a text (end_id in config.ini)"
    except ConfigError as error:
        fault = str(error)
    except Exception as error:  # of the library
        log.warning("no answer can obey a grammar: %s", error)
        fault = f"its tokenizer cannot be used for grammars: {error}"
    checker.close()
    return Grammars(fault=fault)


def _start(checker: GrammarChecker) -> None:
    try:
        checker.start()
    except TridecodeError as error:  # the first grammar fails with it
        log.warning("%s", error)
