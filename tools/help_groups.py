"""Help texts whose options come in groups: the value of `rich_help_panel` is the title."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """Prints the options of each group under its own title, in order; those without a group come first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(record)
        last = groups.pop("Options", [])
        for title, records in {"Options": last, **groups}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
