"""The files of a Triton model repository, as Jinja2 templates: one config.pbtxt for each kind of model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jinja2

from tridecode.backend.doors.contracts.field import Contract


def render(template: str, **values: object) -> str:
    """The text of `template`, e.g. "text.pbtxt". Raises jinja2.UndefinedError for a missing value."""
    return _ENVIRONMENT.get_template(f"{template}.jinja").render(**values)


def _tensors(contract: Contract, uint32_inputs: Collection[str] = ()) -> str:
    """One tensor per line. uint32_inputs: names of INT32 inputs that are declared as UINT32."""
    lines = []
    axis = (-1,) if contract.own_batch_axis else ()
    for field in contract.inputs:
        if field.declared:
            dtype = "UINT32" if field.name in uint32_inputs else field.dtype
            scalar = contract.reshape_scalars and field.dims[-1:] == (1,) and not field.keeps_axis
            shape = "".join(f"{size} " for size in field.dims[:-1])
            reshape = f" reshape: {{ shape: [ {shape}] }}" if scalar else ""
            dims = (*axis, *field.dims)
            optional = "" if field.required else " optional: true"
            lines.append(_tensor("input", field.name, dtype, dims, reshape + optional))
    lines.append("")
    lines += [_tensor("output", one.name, one.dtype, (*axis, *one.dims)) for one in contract.outputs]
    return "\n".join(lines)


def _tensor(direction: str, name: str, dtype: str, dims: tuple[int, ...], more: str = "") -> str:
    shape = ", ".join(map(str, dims))
    return f'{direction} {{ name: "{name}" data_type: TYPE_{dtype} dims: [ {shape} ]{more} }}'


def _maps(direction: str, names: Mapping[str, str]) -> str:
    """A step's tensors: its own name of each -> the ensemble's, one per line."""
    lines = [f'    {direction}_map {{ key: "{key}" value: "{value}" }}' for key, value in names.items()]
    return "\n".join(lines)


def _parameter(key: str, value: object) -> str:
    """An empty value is commented out: Triton would report it without string_value, which clients read."""
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    line = f'parameters {{ key: "{key}" value: {{ string_value: "{text}" }} }}'
    return line if text else f"# {line}"


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader(__name__, "."),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals.update(tensors=_tensors, maps=_maps, parameter=_parameter)
