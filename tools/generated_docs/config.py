"""Generates the tables of docs/reference/config_ini.md and config_pbtxt.md from the code that reads the
files.

    python -m tridecode.tools.generated_docs.config --write

The parameters of config.pbtxt are already rows. For config.ini, every family reads some sections, and the
keys that it reads are recorded with their types and defaults. Without --write the exit code is 1 if a table
of a page is out of date.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tridecode.backend.configuration.door_parameters import DOOR_PARAMETERS, OTHER_PARAMETERS, Parameter
from tridecode.backend.configuration.engine_config import engine_parameters
from tridecode.backend.models import Family, families
from tridecode.backend.models.config_ini import IniSection
from tridecode.backend.models.ini_keys import ACCEPTED, KEYS, NOT_READ, TASK_KEYS
from tridecode.backend.models.layer_sizes_ini import read_layer_sizes
from tridecode.backend.models.quantization_ini import read_quantization
from tridecode.tools.generated_docs.tables import DOCS, markdown, write_or_compare

INI_PAGE, PBTXT_PAGE = DOCS / "reference" / "config_ini.md", DOCS / "reference" / "config_pbtxt.md"
COMMAND = "python -m tridecode.tools.generated_docs.config"

#: the mandatory keys of every family
_SMALLEST = {
    "model_name": "m",
    **dict.fromkeys(("head_num", "num_layer", "start_id", "end_id"), "2"),
    **dict.fromkeys(("size_per_head", "inter_size", "vocab_size", "max_pos_seq_len"), "8"),
    "rotary_embedding": "4",
    "weight_data_type": "fp32",
}
#: other keys that decide which further ones are read
_VARIANTS: tuple[dict[str, str], ...] = (
    {},
    {"attention_scale": "1"},
    {"use_attention_linear_bias": "true"},
    {"has_positional_encoding": "false"},
    {"has_pre_decoder_layernorm": "true", "use_attention_linear_bias": "true"}
    | {"has_positional_encoding": "false", "residual_from_norm": "false"},
    {"has_pre_decoder_layernorm": "true", "use_attention_linear_bias": "true"}
    | {"has_positional_encoding": "false"},
    {"layernorm_type": "post_layernorm"},
    {"model_variant": "opt-pre"},
    {"head_num_per_layer": "1 1"},
)


_ROTARY = ("rope_", "rotary_")


@dataclass
class Read:
    """One key as read by a family. type: as text; default: its text, or "mandatory"."""

    type: str
    default: str


@dataclass
class RecordingSection(IniSection):
    """A section that records the keys read from it."""

    path: Path
    name: str
    items: dict[str, str]
    prefix: str = ""
    asked: set[str] = field(default_factory=set)
    reads: dict[str, Read] = field(default_factory=dict)

    def with_prefix(self, prefix: str) -> IniSection:
        below = super().with_prefix(prefix).items
        return RecordingSection(self.path, self.name, below, prefix, self.asked, self.reads)

    def integer(self, key: str, default: int | None = None, minimum: int | None = None, maximum=2**31 - 1):
        self._keep(key, "whole number", default)
        return super().integer(key, default, minimum, maximum)

    def number(self, key: str, default: float | None = None) -> float:
        self._keep(key, "number", default)
        return super().number(key, default)

    def text(self, key: str, default: str | None = None) -> str:
        self._keep(key, "text", default, weak=True)
        return super().text(key, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        self._keep(key, "true or false", default)
        return super().flag(key, default)

    def choice(self, key: str, default: str, values) -> str:
        self._keep(key, ", ".join(f"`{value}`" for value in values), default.lower())
        return super().choice(key, default, values)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        self._keep(key, "numbers", "none")
        return super().numbers(key, length)

    def integers(self, key: str, length: int, minimum: int = 0) -> tuple[int, ...]:
        self._keep(key, "whole numbers", "none")
        return super().integers(key, length, minimum)

    def _keep(self, key: str, kind: str, default: Any, weak: bool = False) -> None:
        """weak: does not replace a more specific read."""
        if self.prefix or (weak and key in self.reads) or (key in self.reads and kind == "whole numbers"):
            return
        text = str(default).lower() if isinstance(default, bool) else f"{default}"
        self.reads[key] = Read(kind, "mandatory" if default is None else text)


def recorded(family: Family) -> dict[str, Read]:
    """Return the keys that a family reads from some section."""
    reads: dict[str, Read] = {}
    for variant in _VARIANTS:
        for tied_head in (True, False):
            section = RecordingSection(Path("config.ini"), family.section, {**_SMALLEST, **variant})
            if family.recognises(section):
                read_quantization(section, read_layer_sizes(section, family.read(section, tied_head)))
                reads = {**section.reads, **reads}
    return reads


def ini_tables() -> dict[str, str]:
    reads = {name: recorded(family) for name, family in families().items()}
    everywhere = set.intersection(*(set(one) for one in reads.values()))
    common = [key for key in KEYS if key in everywhere]
    rotary = [key for key in KEYS if key.startswith(_ROTARY)]
    others = [key for key in KEYS if key not in everywhere and key not in rotary]
    head = ("key", "type", "default", "meaning")
    return {
        "sections": markdown(("section", "families"), _sections()),
        "common keys": markdown(head, [_row(key, reads) for key in common]),
        "family keys": markdown(
            (*head, "families"), [(*_row(key, reads), _readers(key, reads)) for key in others]
        ),
        "rotary families": ", ".join(name for name, one in reads.items() if "rope_theta" in one) + ".",
        "rotary keys": markdown(head, [_row(key, reads) for key in rotary]),
        "keys not read": markdown(
            ("key", "meaning"), [(f"`{k}`", meaning) for k, meaning in NOT_READ.items()]
        ),
        "task keys": markdown(("key", "meaning"), [(f"`{k}`", meaning) for k, meaning in TASK_KEYS.items()]),
    }


def _sections() -> Iterator[tuple[str, str]]:
    for name in sorted({family.section for family in families().values()}):
        titles = [family.title for family in families().values() if family.section == name]
        yield f"`[{name}]`", ", ".join(titles)


def _row(key: str, reads: dict[str, dict[str, Read]]) -> tuple[str, str, str, str]:
    found = {name: one[key] for name, one in reads.items() if key in one}
    types = sorted({read.type for read in found.values()}, key=len)
    accepted = f", {ACCEPTED[key].wanted}" if key in ACCEPTED else ""
    return f"`{key}`", types[-1] + accepted, _defaults(key, found), KEYS[key]


def _defaults(key: str, found: dict[str, Read]) -> str:
    """Return the most common default, and the families with another; "" if the meaning states it."""
    if "default:" in KEYS[key]:
        return ""
    counts = Counter(read.default for read in found.values())
    usual = counts.most_common(1)[0][0]
    others = [
        f"{default} ({', '.join(name for name, read in found.items() if read.default == default)})"
        for default in counts
        if default != usual
    ]
    return "; ".join([usual, *others])


def _readers(key: str, reads: dict[str, dict[str, Read]]) -> str:
    with_key = [name for name, one in reads.items() if key in one]
    without = [name for name in reads if name not in with_key]
    return f"all but {', '.join(without)}" if len(without) < 4 else ", ".join(with_key)


def pbtxt_tables() -> dict[str, str]:
    doors = [(*_parameter(row), row.models) for row in DOOR_PARAMETERS]
    others = [(f"`{name}`", meaning) for name, meaning in OTHER_PARAMETERS.items()]
    head = ("parameter", "type", "default", "accepted", "meaning")
    return {
        "engine parameters": markdown(head, map(_parameter, engine_parameters())),
        "door parameters": markdown((*head, "models"), doors),
        "other parameters": markdown(("parameter", "meaning"), others),
    }


def _parameter(row: Parameter) -> tuple[str, str, str, str, str]:
    default = str(row.default).lower() if isinstance(row.default, bool) else f"{row.default}"
    text = "auto" if row.default is None else "none" if row.default == () else default
    return f"`{row.name}`", row.type, text, row.wanted, row.meaning


def main(arguments: list[str]) -> int:
    pages = {INI_PAGE: ini_tables(), PBTXT_PAGE: pbtxt_tables()}
    return write_or_compare(pages, "--write" in arguments, COMMAND)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
