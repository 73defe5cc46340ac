"""The engine's settings: `EngineConfig`, read from `config.pbtxt` of the `fastertransformer` model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tridecode.backend.base.errors import ConfigError, UnsupportedError
from tridecode.backend.configuration.door_parameters import Parameter, refuse_unknown
from tridecode.backend.configuration.model_config import DTYPES
from tridecode.backend.configuration.setting_values import Accepted, parse_flag

CACHE_FORMATS = ("fp8", "int8")  # values of kv_cache_dtype, besides that of data_type
CACHE_SCOPES = ("all", "salt", "none")
#: values of speculation
SPECULATION = ("off", "lookup", "draft", "heads", "glide", "lookup+draft", "lookup+heads", "lookup+glide")
VERIFY_MODES = ("sizes", "sampled", "full")

#: rows of a step in which a few sequences have drafts, at most
DRAFT_ROWS = 64
_T = TypeVar("_T")


def setting(default: _T, meaning: str, accepted: Accepted | None = None) -> _T:
    """A field of EngineConfig. meaning: for docs/reference/config_pbtxt.md. accepted: None: any value."""
    return field(default=default, metadata={"meaning": meaning, "accepted": accepted})


def _one_of(*values: str) -> Accepted:
    return Accepted("one of " + ", ".join(values), lambda value: value in values)


_COUNT = Accepted("1 or more", lambda value: value >= 1)
_SOME = Accepted("0 or more", lambda value: value >= 0)
_CHOSEN = Accepted("1 or more, or auto", lambda value: value is None or value >= 1)
_HOST_BYTES = Accepted(
    "0, or 1048576 (1 MiB) to 2**50", lambda value: value == 0 or 1 << 20 <= value <= 1 << 50
)
_SECONDS = Accepted("more than 0 seconds", lambda value: value > 0)
_DEVICES = Accepted(
    "numbers separated by commas, as in 0,1, or auto",
    lambda value: value == "auto" or all(part.strip().isdigit() for part in value.split(",")),
)
_PORT = Accepted("1 to 65535, or auto", lambda value: value is None or 1 <= value <= 65_535)
_SHARE = Accepted("a number in (0, 1]", lambda value: 0.0 < value <= 1.0)
_DRAFTS = Accepted("1 to 15", lambda value: 1 <= value <= 15)
_PART = Accepted("a number in [0, 1]", lambda value: 0.0 <= value <= 1.0)

#: FasterTransformer's: 0 no rounding while loading, 1 weights, 2 weights and the rows of their inputs
INT8_MODES = (0, 1, 2)


@dataclass(frozen=True)
class EngineConfig:
    """The engine's settings, from the `parameters` of the fastertransformer model's config.pbtxt.

    The keys of the first group are FasterTransformer's, the others ours. None: chosen and logged at start-up.
    """

    tensor_para_size: int = setting(1, "tensor-parallel degree; weight files of any degree load", _COUNT)
    pipeline_para_size: int = setting(1, "pipeline-parallel degree", _COUNT)
    data_type: str = setting(
        "fp32",
        "dtype of the computation and, unless `kv_cache_dtype` says otherwise, of the cache",
        _one_of(*DTYPES),
    )
    int8_mode: int = setting(
        0,
        "1: layer matrices stored in 16 or 32 bit are quantised to int8 at load; 2: and their inputs, per "
        "row, in every GEMM (W8A8)",
    )
    int8_head: bool = setting(
        False,
        "the head, and the word embedding if it is tied to the head, are quantised to int8 at load, "
        "independently of the layers",
    )
    int8_head_inputs: bool = setting(
        False,
        "the head is quantised as by int8_head, and so are its inputs, per row (W8A8): faster from about 128 "
        "rows on, less precise",
    )
    enable_custom_all_reduce: bool = setting(
        True,
        "GPUs of one node: tensor ranks sum through peer memory and split embedding and head among them; "
        "false: they sum through NCCL, and each holds embedding and head in full",
    )

    device: str = setting("auto", "auto: cuda if there is a GPU", _one_of("auto", "cpu", "cuda"))
    devices: str = setting(
        "auto",
        "GPUs of the ranks of a node, as CUDA numbers those of `CUDA_VISIBLE_DEVICES`, separated by commas; "
        "the engines of several instances take them in order; auto: from 0 on",
        _DEVICES,
    )
    weights: str = setting(
        "files",
        "random: of the model's shapes, for benchmarks without a checkpoint",
        _one_of("files", "random"),
    )
    verify_weights: str = setting(
        "sampled",
        "check of the files against `manifest.json` at start-up: sizes, sampled (4 KiB of each MiB), full "
        "(every byte)",
        _one_of(*VERIFY_MODES),
    )
    max_sequences: int | None = setting(
        None,
        "sequences that decode together (batch slots); auto: 64 on a CPU, 64 to 256 on a GPU, by its memory",
        _CHOSEN,
    )
    max_queued_requests: int = setting(
        1024, "length of the queue; a request beyond it is answered UNAVAILABLE", _COUNT
    )
    max_sequence_tokens: int | None = setting(
        None,
        "tokens of prompt and output of one sequence; auto: the model's number of positions, which is a "
        "hard limit only for a learned table",
        _CHOSEN,
    )
    max_step_tokens: int | None = setting(
        None,
        "tokens of one step; longer prompts are computed in chunks. auto: 512 on a CPU, 8,192 on a GPU, "
        "16,384 on one of 70 GB or more; at most 8,192 while sequences decode",
        _CHOSEN,
    )
    block_tokens: int = setting(32, "KV-cache tokens of one block", _COUNT)
    kv_cache_dtype: str = setting(
        "auto",
        "dtype of the KV cache; 8-bit types have a scale for each token and head; auto: `data_type`",
        _one_of("auto", *CACHE_FORMATS),
    )
    cache_bytes: int | None = setting(
        None, "bytes of the KV cache; auto: `memory_fraction` of what is free after loading", _CHOSEN
    )
    memory_fraction: float = setting(0.9, "share of the free memory that the KV cache takes", _SHARE)
    max_bad_word_tokens: int = setting(256, "token ids in all bad words of a sequence", _SOME)
    max_stop_word_tokens: int = setting(1024, "token ids in all stop words of a sequence", _SOME)
    max_logits_bytes: int = setting(256 << 20, "bytes of the logits that one request returns", _SOME)
    max_grammar_bytes: int = setting(256 << 10, "bytes of the schema or grammar that an answer obeys", _SOME)
    grammar_cpu_ms: float = setting(
        150.0,
        "CPU time limit for compiling a grammar; milliseconds",
        Accepted("more than 0 milliseconds", lambda value: value > 0),
    )
    mask_cpu_ms: float = setting(
        20.0,
        "CPU time for the mask of one token of an answer that obeys a grammar; milliseconds",
        Accepted("more than 0 milliseconds", lambda value: value > 0),
    )
    request_timeout_s: float = setting(600.0, "deadline of a request that sets none, in seconds", _SECONDS)
    step_timeout_s: float = setting(60.0, "a step that takes longer counts as hung; seconds", _SECONDS)
    start_timeout_s: float = setting(
        900.0, "time for loading and warming up, in seconds; the doors wait as long", _SECONDS
    )
    cuda_graphs: bool = setting(True, "decode steps and short prompts as CUDA graphs; false for debugging")
    num_threads: int = setting(0, "CPU threads of the engine; 0: torch's own choice", _SOME)
    batch_invariant: bool = setting(
        False, "CPU with fp32 only: log probabilities do not depend on the other requests of a step"
    )
    prefix_cache: bool = setting(
        True, "reuse the cached keys and values of common beginnings of prompts (docs/guides/prefix_cache.md)"
    )
    cache_scope: str = setting(
        "all",
        "which requests share cached prefixes: all (those with the same `cache_salt`, or without any), salt "
        "(only those with the same `cache_salt`), none",
        _one_of(*CACHE_SCOPES),
    )
    host_cache_bytes: int = setting(
        0,
        "bytes of host memory of an engine, for all its ranks on a node, in which blocks of the prefix cache "
        "outlive their eviction and the engine (docs/guides/prefix_cache.md); 0: none",
        _HOST_BYTES,
    )
    lora_path: str = setting(
        "none", "folder of LoRA adapters, relative to that of `config.pbtxt`; none: none are served"
    )
    max_loras: int = setting(8, "adapters in memory; the least recently used idle one is replaced", _COUNT)
    max_lora_rank: int = setting(64, "largest rank of an adapter", _COUNT)
    prompt_table_bytes: int = setting(
        256 << 20, "bytes of the prompt tables that all open requests have sent", _SOME
    )
    speculation: str = setting(
        "off",
        "drafter of the tokens that a step verifies together: off, lookup (searches the sequence's own "
        "text and finished answers), draft (the draft model in draft_path), heads (one-pass heads in "
        "draft_path), glide (a layer in draft_path that attends to the model's own cache), lookup+draft, "
        "lookup+heads or lookup+glide (the more promising of both, for each row); "
        "docs/guides/speculation.md",
        _one_of(*SPECULATION),
    )
    draft_path: str = setting(
        "none",
        "folder of the draft model's weights and tokenizer, or of the heads or the layer that `tridecode "
        "train-draft` wrote, relative to the folder of `config.pbtxt`; for `speculation` with draft, heads "
        "or glide",
    )
    max_draft_tokens: int = setting(7, "drafts of a sequence in a step, at most", _DRAFTS)
    shadow_share: float = setting(
        0.0,
        "share of ended requests that are repeated in 16 bit for comparison (docs/guides/quantization.md); "
        "0: none",
        _PART,
    )
    shadow_weights: str = setting(
        "none",
        "folder of the 16-bit weights for shadow runs, relative to that of `config.pbtxt`; none: the "
        "model's own files, not quantised",
    )
    shadow_slice_tokens: int | None = setting(
        None, "maximum tokens of shadow runs between two steps; auto: 32 on a CPU, 256 on a GPU", _CHOSEN
    )
    shadow_time_share: float = setting(
        0.02,
        "share of the time that shadow runs may take while requests run; 0: only an idle engine runs them",
        _PART,
    )
    shadow_queue: int = setting(16, "requests queued for shadow runs; more are dropped and counted", _COUNT)
    shadow_seed: int = setting(0, "seed of the choice of requests for shadow runs", _SOME)

    openai_port: int | None = setting(
        None, "port of the OpenAI service (docs/guides/openai.md); auto: there is none", _PORT
    )
    openai_address: str = setting("127.0.0.1", "where it listens; 0.0.0.0: on every interface")
    openai_workers: int = setting(1, "its processes, which share the port", _COUNT)
    openai_model_name: str = setting("none", "its name of the model; none: `model_name` of `config.ini`")
    openai_api_key_file: str = setting(
        "none",
        "file with a SHA-256 digest of an API key in each line, relative to `config.pbtxt`; none: no key",
    )
    openai_chat_template: str = setting(
        "none", "file with its chat template, relative to `config.pbtxt`; none: the checkpoint's"
    )
    openai_tool_call_parser: str = setting(
        "none",
        "format in which the model writes tool calls; none: as the chat template shows it",
        _one_of("none", "hermes", "llama3_json", "mistral"),
    )
    openai_cors: str = setting(
        "none", "origins whose pages may call it, separated by commas; *: all; none: no page may"
    )
    openai_batch_dir: str = setting(
        "none", "folder of its files and batches, relative to `config.pbtxt`; none: it has neither"
    )

    # parameters of the config.pbtxt that the engine does not read
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def head_mode(self) -> int:
        """Return how the head is quantised: 0 not, 1 to int8, 2 to int8 like its inputs."""
        return 2 if self.int8_head_inputs else int(self.int8_head)

    @property
    def looks_up(self) -> bool:
        """Return whether drafts are searched in earlier text."""
        return self.speculation.startswith("lookup")

    @property
    def drafter(self) -> str:
        """Return the drafter that has weights in draft_path, or the value of speculation without one."""
        return self.speculation.removeprefix("lookup+")

    @property
    def has_host_tier(self) -> bool:
        """Return whether blocks of the prefix cache are also kept in host memory."""
        return self.host_cache_bytes > 0 and self.shares_prefixes

    @property
    def shares_prefixes(self) -> bool:
        """Return whether some requests may find the blocks of others."""
        return self.prefix_cache and self.cache_scope != "none"

    @property
    def slots(self) -> int:
        """Return the rows for which the engine has buffers, once max_sequences is resolved: max_sequences or,
        with drafts, up to DRAFT_ROWS, because each draft takes a row."""
        assert self.max_sequences is not None
        if self.speculation == "off":
            return self.max_sequences
        wanted = min(self.max_sequences * (1 + self.max_draft_tokens), DRAFT_ROWS)
        return max(self.max_sequences, min(wanted, self.max_step_tokens or wanted))


#: type of a setting -> its conversion and what it accepts
_CONVERSIONS: dict[str, tuple[Callable[[str], object], str]] = {
    "int": (lambda text: int(text, 0), "a whole number"),
    "float": (float, "a number"),
    "bool": (parse_flag, "true or false"),
    "str": (str, "a text"),
}


def read_engine_config(parameters: dict[str, str], where: str) -> EngineConfig:
    """Return EngineConfig from the string parameters of config.pbtxt. `where`: the file's name, for errors.

    "auto" and the empty text mean the default. Raises ConfigError with file, key, value and what was wanted.
    """
    known = {row.name: row.type for row in engine_parameters()}
    refuse_unknown(parameters, known, where)
    values: dict[str, object] = {}
    for key, text in parameters.items():
        if key not in known or text.strip() in ("", "auto"):
            continue
        convert, wanted = _CONVERSIONS[known[key]]
        try:
            values[key] = convert(text.strip())
        except ValueError:
            raise ConfigError(f"{where}: parameter {key} is {text.strip()!r}; wanted {wanted}") from None
    extra = {key: text for key, text in parameters.items() if key not in known}
    config = EngineConfig(**values, extra=extra)  # type: ignore[arg-type]
    _check_engine_config(config, where)
    return config


def with_folders(config: EngineConfig, engine_dir: Path) -> EngineConfig:
    """`config` with its folders, which are relative to that of config.pbtxt, below `engine_dir`."""
    named = {name: getattr(config, name) for name in ("lora_path", "shadow_weights", "draft_path")}
    found: dict[str, Any] = {name: str(engine_dir / one) for name, one in named.items() if one != "none"}
    return replace(config, **found)


def engine_parameters() -> tuple[Parameter, ...]:
    """Return the engine's parameters in config.pbtxt, for docs/reference/config_pbtxt.md and the known
    names.
    """
    return tuple(_engine_parameter(row) for row in fields(EngineConfig) if row.name != "extra")


def _engine_parameter(row: Field[Any]) -> Parameter:
    accepted: Accepted | None = row.metadata["accepted"]
    kind = str(row.type).removesuffix(" | None")
    wanted = accepted.wanted if accepted else _CONVERSIONS[kind][1]
    return Parameter(row.name, kind, row.default, wanted, row.metadata["meaning"])


def _check_engine_config(config: EngineConfig, where: str) -> None:
    for row in fields(EngineConfig):
        accepted: Accepted | None = row.metadata.get("accepted")
        value = getattr(config, row.name)
        if accepted and not accepted.test(value):
            raise ConfigError(f"{where}: parameter {row.name} is {value!r}; wanted {accepted.wanted}")
    if config.int8_mode not in INT8_MODES:
        modes = ", ".join(map(str, INT8_MODES))
        raise UnsupportedError(
            f"{where}: parameter int8_mode is {config.int8_mode}; this version runs {modes}"
        )
