"""AutoRound's checkpoints whose tensors are GPTQ's: see gptq.py for the layout.

`packing_format` says how zeros are stored: "auto_round:auto_gptq" and "auto_round:gptq" each less 1, as
GPTQ's format "gptq"; "auto_round" and "auto_round:gptqmodel" as they are ("gptq_v2"). `extra_config` has
settings of single modules; those of 16 bits stay dense. Source: auto-round 0.16, export_to_autoround and
inference/convert_model.py.
"""

from __future__ import annotations

from typing import Any

from tridecode.backend.base.errors import UnsupportedError
from tridecode.converters.sources.quantized.gptq import Gptq
from tridecode.converters.sources.quantized.settings import Settings

#: settings of the search for the weights: they do not change the stored format
KNOWN = (
    "act_bits", "amp", "autoround_version", "backend", "batch_size", "bits", "block_name_to_quantize",
    "data_type", "dataset", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "extra_config", "gradient_accumulate_steps", "group_size", "iters", "low_gpu_mem_usage", "lr",
    "minmax_lr", "nsamples", "packing_format", "quant_method", "rotation_config", "scale_dtype", "seqlen",
    "sym", "to_quant_block_names",
)  # fmt: skip
#: packing_format -> what is added to a stored zero
_FORMATS = {"auto_round:auto_gptq": 1, "auto_round:gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}
_DENSE_BITS = 16


def read_settings(settings: Settings) -> Gptq:
    """Raises UnsupportedError for another layout or number of bits, activations in 8 bits or fewer, rotated
    weights, and modules that are stored in another way than the rest.
    """
    bits = settings.choice("bits", (4, 8), 4)
    layout = settings.choice("packing_format", tuple(_FORMATS), "auto_round:auto_gptq")
    symmetric = settings.choice("sym", (True, False), True)
    settings.choice("data_type", ("int", "int_sym", "int_asym"), "int")
    _check_activations(settings)
    if settings.held.get("rotation_config"):
        settings.refuse("rotation_config", settings.held["rotation_config"], "none")
    group = settings.group_size(128)
    exceptions = settings.held.get("extra_config") or {}
    if not isinstance(exceptions, dict):
        settings.refuse("extra_config", exceptions, "an object")
    wanted = {"bits": bits, "group_size": settings.held.get("group_size", 128), "sym": symmetric}
    for module, changed in exceptions.items():
        _check_module(settings, module, changed, wanted)
    return Gptq(bits, group, _FORMATS[layout], symmetric)


def _check_activations(settings: Settings) -> None:
    bits = settings.held.get("act_bits")
    if bits is not None and (not isinstance(bits, int) or bits < _DENSE_BITS):
        raise UnsupportedError(
            f"{settings.where} says {settings.title} with act_bits = {bits!r}; this version reads 16"
        )


def _check_module(settings: Settings, module: Any, changed: Any, wanted: dict[str, Any]) -> None:
    if not isinstance(changed, dict):
        settings.refuse("extra_config", changed, "an object for each module")
    bits = changed.get("bits")
    if isinstance(bits, int) and bits >= _DENSE_BITS:
        return
    for key, value in wanted.items():
        if changed.get(key) not in (None, value):
            found = f"extra_config of {str(module)[:60]!r}, {key} = {str(changed[key])[:40]}"
            wanted_here = "this version reads equal settings of all"
            raise UnsupportedError(f"{settings.where} says {settings.title} with {found}; {wanted_here}")
