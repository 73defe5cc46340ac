"""The rendered config.pbtxt files match the contracts of FasterTransformer's backend and TensorRT-LLM.

client_contracts.json has them as [name, type, dims, optional], taken from the config.pbtxt files of
fastertransformer_backend c6936c3 and of tensorrtllm_backend before 6a749f5.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config
from tridecode.backend.configuration.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.model_repo_templates.pbtxt import data_type_name, parse_model_config, string_parameters
from tridecode.model_repo_templates.repository import (
    TOKENIZER_DIR,
    engine_texts,
    repository_models,
    write_models,
)

CONTRACTS = json.loads((Path(__file__).parent / "client_contracts.json").read_text())
OPTIONS = {
    "default": {},
    "text ensemble": {"ensemble_owner": "tensorrt_llm"},
    "ft clients with -d": {"decoupled_fastertransformer": True},
    "plain": {"plain_text": True},
    "all": {
        "ensemble_owner": "tensorrt_llm", "decoupled_fastertransformer": True, "plain_text": True,
        "unbatched_text": True, "exclude_input": True, "uint32_text_inputs": True,
    },
    "tokens": {"contracts": ["tensorrt_llm", "tensorrt_llm_tokens"], "decoupled": ["tensorrt_llm_tokens"]},
}  # fmt: skip
#: sampling parameters that are one number and that no contract names
NUMBERS = {"typical_p", "no_repeat_ngram_size"}
#: optional inputs that our models accept in addition to the contracts
OURS = {
    "text": {"return_num_input_tokens", "return_num_output_tokens", "min_length", "random_seed", "stop",
             "priority", "lora_name", "top_p_decay", "top_p_min", "top_p_reset_ids", "add_special_tokens",
             "resume", "min_p", "cache", "cache_salt", "speculate", *NUMBERS},
    "fastertransformer": {"presence_penalty", "frequency_penalty", "min_length", "priority", "lora_name",
                          "is_return_context_cum_log_probs", "return_context_logits",
                          "return_generation_logits", "resume", "min_p", "sampling_params", "cache",
                          "cache_salt", "speculate", *NUMBERS},
    "ensemble": {"presence_penalty", "frequency_penalty", "min_length", "lora_name",
                 "is_return_context_cum_log_probs", "add_special_tokens", "resume", "min_p", "cache",
                 "cache_salt", "speculate", *NUMBERS},
    "preprocessing": {"ADD_SPECIAL_TOKENS"},
    "postprocessing": set(),
    "vllm": {"add_special_tokens", "resume"},
    "llmapi": {"add_special_tokens", "resume", "cache", "cache_salt", "speculate"},
    "health": {"PROBE"},
    "token_model": {"return_num_input_tokens", "return_num_output_tokens", "min_length", "random_seed",
                    "output_log_probs", "priority", "lora_name", "resume", "min_p", "sampling_params",
                    "cache", "cache_salt", "speculate", *NUMBERS},
    "tensorrt_llm_preprocessing": {"ADD_SPECIAL_TOKENS"},
    "tensorrt_llm_postprocessing": set(),
    "tensorrt_llm_ensemble": {"return_num_input_tokens", "return_num_output_tokens", "min_length",
                              "random_seed", "lora_name", "top_p_decay", "top_p_min", "top_p_reset_ids",
                              "add_special_tokens", "resume", "min_p", "cache", "cache_salt", "speculate",
                              *NUMBERS},
    "text_v05": {"exclude_input_in_output", "return_log_probs", "stop", "priority", "lora_name",
                 "add_special_tokens", "resume"},
}  # fmt: skip


def render(directory: Path, settings: dict | None = None, checkpoint_path: str = "1-gpu", **options) -> dict:
    """Return {name: (folder of templates, parsed config.pbtxt)} of a repository with these options."""
    models = repository_models(**options)
    write_models(
        directory, models, engine=engine_texts(settings or {}, "test"), model_type="GPT",
        checkpoint_path=checkpoint_path, stop_ids="5,6",
    )  # fmt: skip
    return {
        model.name: (
            model.template,
            parse_model_config((directory / model.name / "config.pbtxt").read_text(), model.name),
        )
        for model in models
    }


def table(tensors) -> dict[str, tuple]:
    return {
        t.name: (data_type_name(t.data_type), list(t.dims), bool(getattr(t, "optional", False)))
        for t in tensors
    }


CASES = [
    ("fastertransformer", "fastertransformer/gpt/fastertransformer"),
    ("fastertransformer", "fastertransformer/bloom/fastertransformer"),
    ("preprocessing", "fastertransformer/gpt/preprocessing"),
    ("postprocessing", "fastertransformer/gpt/postprocessing"),
    ("ensemble", "fastertransformer/gpt/ensemble"),
    ("ensemble", "fastertransformer/bloom/ensemble"),
    ("text", "trtllm_inflight_batcher_llm/ensemble"),
    ("token_model", "trtllm_inflight_batcher_llm/tensorrt_llm"),
    ("tensorrt_llm_preprocessing", "trtllm_inflight_batcher_llm/preprocessing"),
    ("tensorrt_llm_postprocessing", "trtllm_inflight_batcher_llm/postprocessing"),
    ("tensorrt_llm_ensemble", "trtllm_inflight_batcher_llm/ensemble"),
    ("text_v05", "trtllm_ensemble_v0.5.0"),
    ("vllm", "vllm_backend"),
    ("llmapi", "trtllm_llmapi/tensorrt_llm"),
]
#: contract of build-repo by kind of model; the default contracts have the other kinds
CONTRACT_OF = {
    "token_model": "tensorrt_llm_tokens",
    "tensorrt_llm_preprocessing": "tensorrt_llm_tokens",
    "tensorrt_llm_postprocessing": "tensorrt_llm_tokens",
    "tensorrt_llm_ensemble": "tensorrt_llm_tokens",
    "text_v05": "tensorrt_llm_v0.5",
    "vllm": "vllm",
    "llmapi": "llmapi",
}
#: inputs that the contract requires, and for which our models have a default
DEFAULTED = {("text", "max_tokens")}
#: our additional outputs
OUR_OUTPUTS = {
    "text": {"num_input_tokens", "num_output_tokens", "finish_reason"},
    "vllm": {"prompt_logprobs"},
    "tensorrt_llm_ensemble": {"num_input_tokens", "num_output_tokens", "finish_reason"},
    "token_model": {"num_input_tokens", "num_output_tokens", "finish_reason", "events"},
    "text_v05": {"cum_log_probs", "output_log_probs", "batch_index", "finish_reason"},
    "fastertransformer": {"context_logits", "generation_logits", "events"},
}


#: flat for any number of rows, as TensorRT-LLM sends them. With one axis declared next to the batch's,
#: Triton would put an axis of 1 before them, because our postprocessing has no batch axis of Triton's.
FLAT_TEXTS = {("tensorrt_llm_postprocessing", "OUTPUT"), ("tensorrt_llm_ensemble", "text_output")}


@pytest.mark.parametrize(("template", "contract"), CASES)
def test_every_tensor_of_the_contract_is_declared_and_nothing_else_is_required(tmp_path, template, contract):
    options = {"contracts": [CONTRACT_OF[template]]} if template in CONTRACT_OF else {}
    models = {name: model for name, model in render(tmp_path, **options).items() if model[0] == template}
    assert models
    for name, (_, config) in models.items():
        inputs, outputs = table(config.input), table(config.output)
        batch = (
            [-1] if template.endswith("postprocessing") else []
        )  # these models declare the axis themselves
        for tensor, dtype, dims, optional in CONTRACTS[contract]["input"]:
            # GPT-J's and GPT-NeoX's postprocessing does not have it
            optional = optional or tensor == "RESPONSE_INPUT_LENGTHS"
            # with a fixed axis Triton refuses a request without rows, which it would not answer otherwise
            fixed = tensor in ("request_output_len", "REQUEST_OUTPUT_LEN", "INPUT_1", "max_tokens")
            dims = [1] if fixed else [*batch, *dims]
            optional = optional or (template, tensor) in DEFAULTED
            assert inputs.pop(tensor) == (dtype, dims, optional), (name, tensor)
        assert set(inputs) == OURS[template]
        assert all(optional for _, _, optional in inputs.values())
        for tensor, dtype, dims, _ in CONTRACTS[contract]["output"]:
            dims = [*dims, -1] if (template, tensor) in FLAT_TEXTS else dims
            assert outputs.pop(tensor) == (dtype, [*batch, *dims], False), (name, tensor)
        assert set(outputs) == OUR_OUTPUTS.get(template, set())


def test_every_model_has_an_answer_for_a_request_without_rows(tmp_path):
    """Triton's python backend drops a batch of 0 rows. Triton's core refuses it if an axis is fixed; with
    max_batch_size 0 the model itself gets it."""
    for options in (*({"contracts": [name]} for name in CONTRACT_OF.values()), {}):
        for name, (template, config) in render(tmp_path / str(len(str(options))), **options).items():
            guards = [
                tensor.name
                for tensor in config.input
                if min(tensor.dims) > 0 and not tensor.optional and not tensor.HasField("reshape")
            ]
            assert guards or config.max_batch_size == 0 or template.endswith("ensemble"), name


def test_the_aliases_have_the_types_that_clients_send(tmp_path):
    text = table(render(tmp_path)["tensorrt_llm_bls"][1].input)
    assert text["min_length"] == text["min_tokens"] == ("INT32", [1], True)
    assert text["random_seed"] == text["seed"] == ("UINT64", [1], True)
    assert text["stop"] == ("BOOL", [1], True)


def test_scalars_of_fastertransformer_reach_the_model_as_one_axis(tmp_path):
    config = render(tmp_path)["fastertransformer"][1]
    reshaped = {tensor.name for tensor in config.input if tensor.HasField("reshape")}
    whole = {
        "input_ids",
        "request_output_len",
        "stop_words_list",
        "bad_words_list",
        "request_prompt_embedding",
    }
    assert reshaped == {tensor.name for tensor in config.input} - whole
    assert all(list(tensor.reshape.shape) == [] for tensor in config.input if tensor.HasField("reshape"))


@pytest.mark.parametrize(
    ("options", "decoupled"),
    [
        (
            "default",
            {
                "fastertransformer": False, "fastertransformer_streaming": True, "preprocessing": False,
                "postprocessing": False, "ensemble": False, "ensemble_streaming": True,
                "tensorrt_llm_bls": True, "tensorrt_llm_bls_plain": False,
            },
        ),
        (
            "text ensemble",
            {
                "fastertransformer": False, "fastertransformer_streaming": True, "preprocessing": False,
                "postprocessing": False, "fastertransformer_ensemble": False,
                "fastertransformer_ensemble_streaming": True, "ensemble": True, "ensemble_plain": False,
                "tensorrt_llm_bls": True, "tensorrt_llm_bls_plain": False,
            },
        ),
        (
            "ft clients with -d",
            {
                "fastertransformer": True, "fastertransformer_plain": False, "preprocessing": False,
                "postprocessing": False, "ensemble": True, "ensemble_plain": False, "tensorrt_llm_bls": True,
                "tensorrt_llm_bls_plain": False,
            },
        ),
        (
            "plain",
            {
                "fastertransformer": False, "fastertransformer_streaming": True, "preprocessing": False,
                "postprocessing": False, "ensemble": False, "ensemble_streaming": True,
                "tensorrt_llm_bls": False, "tensorrt_llm_bls_streaming": True,
            },
        ),
    ],
)  # fmt: skip
def test_each_contract_has_a_streaming_and_a_plain_model(tmp_path, options, decoupled):
    models = render(tmp_path, **OPTIONS[options])
    found = {name: config.model_transaction_policy.decoupled for name, (_, config) in models.items()}
    assert found == {**decoupled, "tridecode_health": False}


@pytest.mark.parametrize("excluded", [False, True])
def test_whether_answers_begin_with_the_prompt_is_an_option_of_the_text_models(tmp_path, excluded):
    models = render(tmp_path, ensemble_owner="tensorrt_llm", exclude_input=excluded)
    found = {
        name: string_parameters(config)["exclude_input_in_output"]
        for name, (kind, config) in models.items()
        if kind == "text"
    }
    names = ["tensorrt_llm_bls", "tensorrt_llm_bls_plain", "ensemble", "ensemble_plain"]
    assert found == dict.fromkeys(names, "true" if excluded else "false")


def test_three_inputs_of_the_text_models_can_be_uint32(tmp_path):
    usual = table(render(tmp_path / "usual")["tensorrt_llm_bls"][1].input)
    for name, (kind, config) in render(tmp_path / "uint32", uint32_text_inputs=True).items():
        if kind == "text":
            found = table(config.input)
            changed = {tensor for tensor in found if found[tensor] != usual[tensor]}
            assert changed == {"max_tokens", "top_k", "beam_width"}, name
            assert {found[tensor][0] for tensor in changed} == {"UINT32"}


def test_callers_without_a_batch_axis_get_a_model_of_their_own_if_asked_for(tmp_path):
    _, config = render(tmp_path, unbatched_text=True)["tensorrt_llm_bls_unbatched"]
    assert config.max_batch_size == 0 and not config.model_transaction_policy.decoupled
    usual = render(tmp_path / "usual")["tensorrt_llm_bls"][1]
    assert table(config.input) == table(usual.input) and table(config.output) == table(usual.output)


def test_vllms_and_the_llm_apis_models_have_no_batch_axis_and_stream_as_their_clients_expect(tmp_path):
    models = render(tmp_path, contracts=("vllm", "llmapi"), vllm_model="opt-125m")
    usual = render(tmp_path / "decoupled", contracts=["llmapi"], decoupled=["llmapi"])["tensorrt_llm"][1]
    assert usual.model_transaction_policy.decoupled
    found = {
        name: (config.max_batch_size, config.model_transaction_policy.decoupled)
        for name, (kind, config) in models.items()
        if kind in ("vllm", "llmapi")
    }
    assert found == {
        "opt-125m": (0, True), "opt-125m_plain": (0, False),
        "tensorrt_llm": (0, False), "tensorrt_llm_streaming": (0, True),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="vllm_model is 'a/b'; wanted a folder's name"):
        repository_models(contracts=["vllm"], vllm_model="a/b")


@pytest.mark.parametrize("options", OPTIONS)
def test_an_ensemble_streams_exactly_if_its_generator_does(tmp_path, options):
    models = render(tmp_path, **OPTIONS[options])
    ensembles = [config for kind, config in models.values() if kind.endswith("ensemble")]
    assert len(ensembles) == 2
    for config in ensembles:
        generator = models[config.ensemble_scheduling.step[1].model_name][1]
        assert generator.model_transaction_policy.decoupled == config.model_transaction_policy.decoupled


@pytest.mark.parametrize("options", OPTIONS)
def test_every_model_is_one_cpu_instance_without_a_queue_of_tritons_own(tmp_path, options):
    for name, (kind, config) in render(tmp_path, **OPTIONS[options]).items():
        assert config.name == name
        assert config.max_batch_size == (
            0 if kind == "health" or kind.endswith("postprocessing") or name.endswith("_unbatched") else 1024
        )
        assert not config.HasField("dynamic_batching") and not config.HasField("sequence_batching")
        assert not config.batch_input and not any(tensor.allow_ragged_batch for tensor in config.input)
        version = tmp_path / name / "1"
        if kind.endswith("ensemble"):
            assert config.platform == "ensemble" and version.is_dir()
            continue
        assert config.backend == "python"
        assert [(group.count, group.kind) for group in config.instance_group] == [
            (1, ModelInstanceGroup.KIND_CPU)
        ]
        assert (version / "model.py").read_text() == (
            f"from tridecode.backend.doors.{kind} import TritonPythonModel  # noqa: F401\n"
        )


def test_every_door_names_the_engine_and_its_tokenizer(tmp_path):
    for name, (kind, config) in render(tmp_path).items():
        parameters = string_parameters(config)
        if kind == "ensemble":
            continue
        assert parameters["engine_model"] == "fastertransformer"
        if kind in ("text", "preprocessing", "postprocessing"):
            assert parameters["tokenizer_dir"] == TOKENIZER_DIR
        if kind in ("text", "preprocessing"):
            assert parameters["add_special_tokens"] == "true"
        if kind == "text":
            assert (parameters["stop_ids"], parameters["exclude_input_in_output"]) == ("5,6", "false")
        if name == "fastertransformer_streaming":
            # only one file configures the engine; the other parameters belong to the door
            assert parameters.pop("engine_model") == "fastertransformer"
            assert set(parameters) == {"merge_behind_s", "max_response_elements", "max_stream_elements"}


def test_no_parameter_is_empty_as_clients_that_read_the_configuration_expect_a_text(tmp_path):
    write_models(
        tmp_path, repository_models(), engine=engine_texts({}, "test"), model_type="GPT",
        checkpoint_path="1-gpu", stop_ids="",
    )  # fmt: skip
    for file in tmp_path.glob("*/config.pbtxt"):
        texts = string_parameters(parse_model_config(file.read_text(), str(file)))
        assert [key for key, text in texts.items() if not text] == [], file


def test_every_setting_of_the_engine_stands_in_the_file_with_its_default(tmp_path):
    parameters = string_parameters(render(tmp_path)["fastertransformer"][1])
    names = {field.name for field in dataclasses.fields(EngineConfig)} - {"extra"}
    assert names <= set(parameters)
    config = read_engine_config(parameters, "config.pbtxt")
    assert dataclasses.replace(config, extra={}) == EngineConfig()
    assert set(config.extra) == {
        "engine_model", "model_type", "model_checkpoint_path", "max_response_elements",
    }  # fmt: skip


def test_engine_settings_reach_the_file(tmp_path):
    settings = {"max_sequences": 3, "cuda_graphs": False, "cache_bytes": 10**9, "device": "cpu"}
    parameters = string_parameters(render(tmp_path, settings)["fastertransformer"][1])
    config = read_engine_config(parameters, "config.pbtxt")
    assert {key: getattr(config, key) for key in settings} == settings


def test_a_setting_that_the_engine_does_not_have_is_refused_by_name():
    with pytest.raises(ConfigError, match="no parameter max_sequence; did you mean max_sequences"):
        engine_texts({"max_sequence": 3}, "engine settings")


def test_an_owner_of_the_ensemble_that_is_none_is_refused():
    with pytest.raises(
        ConfigError, match="ensemble_owner is 'vllm'; wanted one of fastertransformer, tensorrt_llm"
    ):
        repository_models(ensemble_owner="vllm")


@pytest.mark.parametrize("path", ["1-gpu", 'a "quoted" folder', "back\\slash", "ünïcode"])
def test_any_checkpoint_path_survives_the_file(tmp_path, path):
    render(tmp_path, checkpoint_path=path)
    assert read_engine_parameters(str(tmp_path / "fastertransformer"))["model_checkpoint_path"] == path
    assert checkpoint_dir(str(tmp_path / "fastertransformer")) == str(
        tmp_path / "fastertransformer" / "1" / path
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('name: "x" colour: 3', "colour"),
        ('name: "x', "1:7"),
        (
            'input { name: "a" data_type: TYPE_FP32 } input { name: "a" data_type: TYPE_FP32 }',
            "input a is declared 2 times; wanted once",
        ),
    ],
)
def test_a_config_that_triton_would_not_take_is_refused(text, complaint):
    with pytest.raises(ConfigError, match=f"m/config.pbtxt: .*{complaint}"):
        parse_model_config(text, "m/config.pbtxt")
