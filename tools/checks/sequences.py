"""Sequence batching, which a model of conversations needs (docs/guides/interactive.md) and no other has."""

from __future__ import annotations

from collections.abc import Iterator

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelSequenceBatching

_NEEDED = ("CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_READY")


def sequence_faults(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """(found, wanted, what to do) of each fault."""
    batching = model.sequence_batching
    if not any(tensor.name == "session_len" for tensor in model.input):
        if model.HasField("sequence_batching"):
            yield "sequence_batching", "none", "Every request is complete in itself; remove it."
        return
    if not model.HasField("sequence_batching"):
        yield "no sequence_batching", "the strategy direct", "Sessions need it; build the repository again."
        return
    strategy = batching.WhichOneof("strategy_choice") or "direct"
    if strategy != "direct":
        yield f"sequence_batching {strategy}", "direct", "Sessions are tested with it alone."
    names = ModelSequenceBatching.Control.Kind.Name
    kinds = {names(control.kind): each.name for each in batching.control_input for control in each.control}
    for kind in _NEEDED:
        name = kind.rsplit("_", 1)[1]
        if kinds.get(kind) != name:
            yield f"{kind} named {kinds.get(kind, 'nowhere')!r}", f"a control_input {name}", "Name it so."
    if model.max_batch_size < 1:
        yield "max_batch_size 0", "the number of conversations at once", "Every tensor has a first axis."
