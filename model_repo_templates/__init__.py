"""The files of a Triton model repository, as Jinja2 templates: a folder for each kind of model."""

from __future__ import annotations

import jinja2

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader(__name__, "."),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
# texts stand between double quotes in config.pbtxt
_ENVIRONMENT.filters["escaped"] = lambda value: str(value).replace("\\", "\\\\").replace('"', '\\"')


def render(template: str, **values: object) -> str:
    """The text of `template`, e.g. "text/config.pbtxt". Raises jinja2.UndefinedError for a value it lacks."""
    return _ENVIRONMENT.get_template(f"{template}.jinja").render(**values)
