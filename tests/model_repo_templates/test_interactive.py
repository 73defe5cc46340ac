"""The models of interactive generation against FasterTransformer's plain ones, with an axis more in front."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelSequenceBatching

from tests.model_repo_templates.test_repository import render, table
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config_file import read_engine_parameters
from tridecode.model_repo_templates.pbtxt import parse_model_config, string_parameters
from tridecode.model_repo_templates.repository import repository_models
from tridecode.tools.checks.sequences import sequence_faults

PLAIN = json.loads((Path(__file__).parent / "client_contracts.json").read_text())
ALONE = {"contracts": ["interactive"]}
#: of the plain model, and not of the interactive one
NOT_THERE = {"is_return_context_embeddings", "response_input_lengths", "context_embeddings"}
OURS = {"presence_penalty", "frequency_penalty", "min_length", "min_p", "priority", "lora_name", "resume"}
OURS |= {"add_special_tokens", "ADD_SPECIAL_TOKENS", "no_repeat_ngram_size", "typical_p"}


@pytest.mark.parametrize("kind", ["fastertransformer", "preprocessing", "postprocessing", "ensemble"])
def test_each_tensor_is_that_of_the_plain_model_with_an_axis_more(tmp_path, kind):
    _, config = render(tmp_path, **ALONE)[kind]
    contract = PLAIN[f"fastertransformer/gpt/{kind}"]
    inputs, outputs = table(config.input), table(config.output)
    for name, dtype, dims, optional in contract["input"]:
        if name not in NOT_THERE | {"RESPONSE_INPUT_LENGTHS"}:
            assert inputs.pop(name) == (dtype, [-1, *dims], optional), name
    sessions = {"session_len", "memory_len"} if kind in ("fastertransformer", "ensemble") else set()
    assert {name: inputs.pop(name) for name in sessions} == dict.fromkeys(sessions, ("UINT32", [-1, 1], True))
    assert set(inputs) <= OURS and all(optional for _, _, optional in inputs.values())
    for name, dtype, dims, _ in contract["output"]:
        if name not in NOT_THERE:
            flat = kind in ("postprocessing", "ensemble") and dtype == "STRING"
            assert outputs.pop(name) == (dtype, dims if flat else [-1, *dims], False), name
    assert not outputs


def test_the_generator_has_tritons_direct_sequence_batching(tmp_path):
    for name in ("fastertransformer", "fastertransformer_streaming"):
        config = render(tmp_path / name, **ALONE)[name][1]
        batching = config.sequence_batching
        assert batching.WhichOneof("strategy_choice") == "direct"
        assert batching.max_sequence_idle_microseconds == 60_000_000
        kinds = ModelSequenceBatching.Control
        assert {control.name: control.control[0].kind for control in batching.control_input} == {
            "START": kinds.CONTROL_SEQUENCE_START,
            "READY": kinds.CONTROL_SEQUENCE_READY,
            "END": kinds.CONTROL_SEQUENCE_END,
            "CORRID": kinds.CONTROL_SEQUENCE_CORRID,
        }
        assert config.max_batch_size == 64
        scalars = {
            tensor.name: list(tensor.reshape.shape) for tensor in config.input if tensor.HasField("reshape")
        }
        assert set(map(tuple, scalars.values())) == {(-1,)} and "session_len" in scalars


def test_alone_it_configures_the_engine(tmp_path):
    render(tmp_path, {"max_sequences": 3}, **ALONE)
    assert read_engine_parameters(str(tmp_path / "fastertransformer"))["max_sequences"] == "3"


def test_beside_the_plain_models_one_of_them_keeps_the_names(tmp_path):
    both = ["fastertransformer", "interactive"]
    with pytest.raises(ConfigError, match="--owner fastertransformer or --owner interactive"):
        repository_models(contracts=both)
    models = render(tmp_path, contracts=both, owners=["fastertransformer"])
    kinds = {name: kind for name, (kind, _) in models.items()}
    assert kinds["fastertransformer"] == "fastertransformer"
    assert kinds["interactive_fastertransformer"] == "interactive"
    _, ensemble = models["interactive_ensemble"]
    assert [step.model_name for step in ensemble.ensemble_scheduling.step] == [
        "interactive_preprocessing", "interactive_fastertransformer", "interactive_postprocessing",
    ]  # fmt: skip
    assert "max_sequences" not in string_parameters(models["interactive_fastertransformer"][1])


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("direct { }", "oldest { }", "sequence_batching oldest"),
        ('name: "END"', 'name: "STOP"', "CONTROL_SEQUENCE_END named 'STOP'"),
        ("max_batch_size: 64", "max_batch_size: 0", "max_batch_size 0"),
    ],
)
def test_check_knows_what_sessions_need(tmp_path, before, after, found):
    render(tmp_path, **ALONE)
    text = (tmp_path / "fastertransformer" / "config.pbtxt").read_text()
    assert not list(sequence_faults(parse_model_config(text, "config.pbtxt")))
    assert before in text
    changed = parse_model_config(text.replace(before, after, 1), "config.pbtxt")
    assert [fault[0] for fault in sequence_faults(changed)] == [found]
