"""Which `parameters` of a config.pbtxt somebody reads, and the nearest of them to one that nobody does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields

from tridecode.backend.config import EngineConfig

ENGINE = frozenset(field.name for field in fields(EngineConfig) if field.name != "extra")
#: of every door (backend/doors/settings.py)
DOORS = frozenset(
    {
        *("engine_model", "tokenizer_dir", "stop_ids", "exclude_input_in_output", "add_special_tokens"),
        *("skip_special_tokens", "num_senders", "merge_behind_s", "wait_for_engine", "start_timeout_s"),
        *("hold_s", "probe_timeout_s", "allowed_parameters", "max_prompt_bytes", "max_request_bytes"),
        *("max_response_elements", "max_stream_elements", "max_preparing_requests", "max_preparing_bytes"),
    }
)
#: of FasterTransformer's configurations and of Triton's python backend: others read them, or nobody
OTHERS = frozenset(
    {
        *("model_type", "model_checkpoint_path", "enable_custom_all_reduce"),
        *("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"),
    }
)


def unknown(names: Iterable[str], engine: bool) -> list[str]:
    """Those that nobody reads. engine: of the engine's model, else of another door."""
    known = DOORS | OTHERS | (ENGINE if engine else frozenset())
    return sorted(set(names) - known)


def nearest(name: str, engine: bool) -> str | None:
    """The known name that a misspelt one was probably meant to be."""
    known = DOORS | OTHERS | (ENGINE if engine else frozenset())
    spelt = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), sorted(spelt), n=1, cutoff=0.7)
    return spelt[found[0]] if found else None


def advice(name: str, engine: bool) -> str:
    """What to do about an unknown name."""
    meant = nearest(name, engine)
    return f"Nothing reads it; did you mean {meant}?" if meant else "Nothing reads it; remove it."
