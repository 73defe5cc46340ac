"""Settings shadow_*: whether and how an engine compares its answers with 16-bit weights. No device."""

from __future__ import annotations

from dataclasses import fields, replace

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import CACHE_FORMATS, EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig

#: tokens of a slice of shadow work, on each device: short beside a prefill step
SLICE_TOKENS = {"cpu": 32, "cuda": 256}
#: fields in which the reference may differ from the model that is served
_OWN_FIELDS = ("model_name", "weight_dtype", "quantization")


def check_shadow(model: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError where shadow_share is set and the engine cannot compare its answers."""
    if not config.shadow_share:
        return
    asked = f"parameter shadow_share is {config.shadow_share:g}"
    for name in ("tensor_para_size", "pipeline_para_size"):
        if getattr(config, name) != 1:
            raise ConfigError(f"{asked} with {name} = {getattr(config, name)}; shadow runs want {name} = 1")
    if config.weights == "random":
        raise ConfigError(f"{asked} with weights = random; shadow runs want weights = files")
    if model.quantization is not None and config.shadow_weights == "none":
        raise ConfigError(
            f"{asked} and the weights of {model.model_name} are {model.quantization.weights}; wanted the "
            "folder of the same model's 16-bit weights in shadow_weights"
        )
    if not rounds_weights(model, config) and config.kv_cache_dtype not in CACHE_FORMATS:
        raise ConfigError(
            f"{asked}, but nothing of {model.model_name} is rounded; wanted a quantised weight directory, "
            "int8_mode = 1 or 2, or kv_cache_dtype = int8 or fp8"
        )


def needs_second_weights(model: ModelConfig, config: EngineConfig) -> bool:
    """Return whether the reference needs its own weights: not if only the cache is quantised."""
    return rounds_weights(model, config) or config.shadow_weights != "none"


def rounds_weights(model: ModelConfig, config: EngineConfig) -> bool:
    """Return whether the served model's weights are quantised, in the files or while loading."""
    return model.quantization is not None or config.int8_mode != 0 or config.int8_head


def reference_config(model: ModelConfig) -> ModelConfig:
    """The model that is served, not quantised."""
    return replace(model, quantization=None)


def check_reference(served: ModelConfig, reference: ModelConfig, where: str) -> None:
    """Raises ConfigError unless `reference`, of the folder `where`, is `served` with unquantised weights."""
    if reference.quantization is not None:
        raise ConfigError(
            f"parameter shadow_weights names {where}, whose weights are {reference.quantization.weights}; "
            "wanted weights in fp16, bf16 or fp32"
        )
    for row in fields(ModelConfig):
        found, wanted = getattr(reference, row.name), getattr(served, row.name)
        if row.name not in _OWN_FIELDS and found != wanted:
            raise ConfigError(
                f"parameter shadow_weights names {where}, a model with {row.name} = {found}; wanted that of "
                f"the model that is served, {wanted}"
            )


def with_slice_tokens(config: EngineConfig, device_type: str) -> EngineConfig:
    """`config` with shadow_slice_tokens decided: max_step_tokens, which is decided, at most."""
    assert config.max_step_tokens is not None
    chosen = config.shadow_slice_tokens or SLICE_TOKENS[device_type]
    return replace(config, shadow_slice_tokens=min(chosen, config.max_step_tokens))
