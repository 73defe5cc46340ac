"""The tensors of `tridecode_health`."""

from __future__ import annotations

from tridecode.backend.doors.contracts.field import Contract, Field, Output

HEALTH = Contract(
    (Field("PROBE", "BOOL", "no effect: Triton requires an input"),),
    (
        Output("READY", "BOOL", (1,), "true; otherwise the answer is an error"),
        Output("PHASE", "STRING", (1,), "`ready`"),
        Output("DETAIL", "STRING", (1,), "what the engine is doing"),
        Output("MODELS", "STRING", (-1,), "names of the models of this repository"),
        Output("STREAMS", "BOOL", (-1,), "for each model, whether it streams (is decoupled)"),
        Output(
            "ENGINE",
            "STRING",
            (1,),
            "JSON: the engine's limits and the version of its messages, for `tridecode front --triton`",
        ),
    ),
)
