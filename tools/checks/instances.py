"""instance_group: engines of the engine's own model, and which of them the other models reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tritonclient.grpc.model_config_pb2 import ModelConfig

from tridecode.backend.configuration.engine_instances import InstanceGroup, num_engines
from tridecode.model_repo_templates.pbtxt import string_parameters

#: models that run no requests on an engine, and the probe, which watches all engines
_ONE_IS_ENOUGH = ("processing", "tridecode_health")


def groups_of(model: ModelConfig) -> tuple[InstanceGroup, ...]:
    """Return the instance groups as backend.configuration.engine_instances reads them."""
    found = [InstanceGroup(max(1, group.count), tuple(group.gpus)) for group in model.instance_group]
    return tuple(found) or (InstanceGroup(),)


def instance_faults(
    model: ModelConfig, models: Mapping[str, ModelConfig], engines: set[str]
) -> Iterator[tuple[str, str, str, str]]:
    """(severity, found, wanted, what to do) of each fault. engines: models that configure an engine."""
    of_engine = model.name in engines
    for group in model.instance_group:
        if group.kind != group.KIND_CPU and not (of_engine and group.gpus):
            kind = type(group).Kind.Name(group.kind)
            yield "error", f"instance_group {kind}", "KIND_CPU", "These models only talk to the engine."
    if of_engine or model.platform == "ensemble":
        return
    count = num_engines(groups_of(model))
    engine = string_parameters(model).get("engine_model", "")
    there = num_engines(groups_of(models[engine])) if engine in models else 1
    wanted = 1 if model.name.endswith(_ONE_IS_ENOUGH) else there
    if count > wanted:
        fix = "Each is one more process; one serves hundreds of requests."
        yield "warning", f"{count} instances", str(wanted), fix
    elif count < wanted:
        fix = "An instance uses one engine: requests to this model never reach the others."
        yield "warning", f"{count} instance(s) for the {there} engines of {engine}", str(wanted), fix
