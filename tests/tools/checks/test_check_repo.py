"""Each way to spoil a repository is found, named, and comes with what to do."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.checkpoints import save, tiny_llama
from tridecode.tools.bench.shapes.presets import preset
from tridecode.tools.bench.shapes.random_repo import write_random_repository
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.checks.findings import Finding
from tridecode.tools.checks.repository import check_repo
from tridecode.tools.doctor.repository import repository_findings as doctor_findings


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("built")
    return build_repo(save(tiny_llama(), directory / "hf"), directory / "repo")


@pytest.fixture
def repository(built, tmp_path) -> Path:
    return shutil.copytree(built, tmp_path / "repo")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def the_finding(repository: Path, **options) -> Finding:
    findings = check_repo(repository, **options)
    assert len(findings) == 1, [str(finding) for finding in findings]
    assert all((findings[0].where, findings[0].found, findings[0].wanted, findings[0].fix))
    return findings[0]


def test_a_fresh_repository_has_nothing_wrong(repository):
    assert check_repo(repository, checksums=True) == []


def test_settings_of_the_engines_own_door_are_known(built, tmp_path):
    repository = build_repo(
        built.parent / "hf", tmp_path / "repo", decoupled_fastertransformer=True, parity=False
    )
    config = repository / "fastertransformer" / "config.pbtxt"
    edit(config, BEFORE, f'parameters {{ key: "num_senders" value: {{ string_value: "8" }} }} {BEFORE}')
    assert "merge_behind_s" in config.read_text()
    assert not [finding for finding in check_repo(repository) if finding.found.startswith("parameter ")]


def test_a_repository_of_random_weights_needs_neither_files_nor_proof(tmp_path):
    directory = write_random_repository(tmp_path / "r", preset("toy").model)
    finding = the_finding(directory, checksums=True)
    assert (finding.severity, finding.found) == ("warning", "weights random")
    edit(
        directory / "fastertransformer" / "config.pbtxt",
        value("weights", "random"),
        value("weights", "files"),
    )
    assert {finding.severity for finding in check_repo(directory)} == {"error"}


def test_no_directory_is_a_finding(tmp_path):
    assert the_finding(tmp_path / "absent").found == "no directory"


def test_an_empty_directory_has_no_engine(tmp_path):
    assert the_finding(tmp_path).found == "no model with a parameter engine_model"


def value(key: str, text: str) -> str:
    return f'"{key}" value: {{ string_value: "{text}"'


FT, BEFORE = "fastertransformer", "instance_group"
#: fault: (model, text in its config.pbtxt, its replacement, severity, the finding)
CONFIG_EDITS = {
    "another name": ("ensemble", 'name: "ensemble"', 'name: "other"', "error", "name 'other'"),
    "a typing error": ("preprocessing", "max_batch_size", "max_batchsize", "error", "max_batchsize"),
    "dynamic batching": (FT, BEFORE, f"dynamic_batching {{ }} {BEFORE}", "warning", "dynamic_batching"),
    "a cached stream": (
        "tensorrt_llm_bls", BEFORE, f"response_cache {{ enable: true }} {BEFORE}", "error",
        "response_cache on a decoupled model",
    ),
    "a GPU instance": ("postprocessing", "KIND_CPU", "KIND_GPU", "error", "instance_group KIND_GPU"),
    "four instances": ("tensorrt_llm_bls_plain", "count: 1", "count: 4", "warning", "4 instances"),
    "two engines": (
        FT, "count: 1", "count: 2", "warning", "1 instance(s) for the 2 engines of fastertransformer",
    ),
    "an engine on any GPU": (FT, "KIND_CPU", "KIND_GPU", "error", "instance_group KIND_GPU"),
    "ragged input": (
        FT, "dims: [ -1 ]", "dims: [ -1 ] allow_ragged_batch: true", "warning",
        "input input_ids with allow_ragged_batch",
    ),
    "sequence batching": (
        "fastertransformer_streaming", BEFORE, f"sequence_batching {{ }} {BEFORE}", "error",
        "sequence_batching",
    ),
    "a misspelt setting": (
        FT, 'key: "max_sequences"', 'key: "max_sequence"', "error", "parameter max_sequence",
    ),
    "a setting out of range": (
        FT, value("memory_fraction", "0.9"), value("memory_fraction", "9"), "error",
        "parameter memory_fraction is 9.0; wanted",
    ),
    "more positions than the model has": (
        FT, value("max_sequence_tokens", "auto"), value("max_sequence_tokens", "4096"), "warning",
        "max_sequence_tokens 4096",
    ),
    "more positions than can be computed": (
        FT, value("max_sequence_tokens", "auto"), value("max_sequence_tokens", "16777217"), "error",
        "max_sequence_tokens is 16777217",
    ),
    "ranks that cut the heads": (
        FT, value("tensor_para_size", "1"), value("tensor_para_size", "4"), "error",
        "does not divide head_num = 6",
    ),
    "more stages than layers": (
        FT, value("pipeline_para_size", "1"), value("pipeline_para_size", "3"), "error",
        "pipeline_para_size = 3 leaves stages without layers",
    ),
    "invented weights": (
        FT, value("weights", "files"), value("weights", "random"), "warning", "weights random",
    ),
    "an engine that is not there": (
        "tensorrt_llm_bls", value("engine_model", FT), value("engine_model", "slow"), "error",
        "engine_model slow",
    ),
    "a wrong type on the way": (
        "preprocessing", '"INPUT_ID" data_type: TYPE_UINT32', '"INPUT_ID" data_type: TYPE_INT32', "error",
        "_INPUT_ID INT32 [-1, -1] into input_ids UINT32 [-1, -1]",
    ),
    "a wrong shape on the way": (
        "postprocessing", "TYPE_UINT32 dims: [ -1, -1, -1 ]", "TYPE_UINT32 dims: [ -1, -1 ]", "error",
        "into TOKENS_BATCH UINT32 [-1, -1]",
    ),
    "an input that the ensemble does not feed": (
        "postprocessing", "output {", 'input { name: "MORE" data_type: TYPE_FP32 dims: [ 1 ] } output {',
        "error", "no input_map for MORE",
    ),
    "an input that the step lost": (
        FT, 'input { name: "end_id"', 'input { name: "eos"', "error", "input_map end_id from end_id",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONFIG_EDITS)
def test_a_fault_in_a_config_is_found(repository, fault):
    model, old, new, severity, found = CONFIG_EDITS[fault]
    edit(repository / model / "config.pbtxt", old, new)
    findings = check_repo(repository)
    assert any(found in finding.found and finding.severity == severity for finding in findings), [
        str(finding) for finding in findings
    ]


def test_two_engines_that_all_models_reach_are_no_fault(repository):
    reaching = [
        "fastertransformer",
        "fastertransformer_streaming",
        "tensorrt_llm_bls",
        "tensorrt_llm_bls_plain",
    ]
    for model in reaching:
        assert any(model in finding.where for finding in check_repo(repository)) == (model != reaching[0])
        edit(repository / model / "config.pbtxt", "count: 1", "count: 2")
    assert check_repo(repository) == []


def test_an_engine_on_listed_gpus_is_no_fault(repository):
    edit(repository / FT / "config.pbtxt", "kind: KIND_CPU", "kind: KIND_GPU gpus: [ 1 ]")
    assert check_repo(repository) == []


def test_an_optional_input_cannot_feed_a_required_one(repository):
    path = repository / "fastertransformer" / "config.pbtxt"
    edit(path, '"temperature" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } optional: true',
         '"temperature" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] }')  # fmt: skip
    assert the_finding(repository).found == "optional temperature into required temperature"


def test_an_ensemble_over_a_stream_must_stream(repository):
    path = repository / "ensemble_streaming" / "config.pbtxt"
    edit(path, "model_transaction_policy { decoupled: true }", "")
    assert the_finding(repository).found == "a decoupled step in an ensemble that is not"


def test_an_output_that_nothing_makes_is_found(repository):
    path = repository / "ensemble" / "config.pbtxt"
    edit(path, 'output_map { key: "cum_log_probs" value: "cum_log_probs" }', "")
    assert the_finding(repository).found == "output cum_log_probs that no step makes"


def test_a_missing_step_is_found(repository):
    shutil.rmtree(repository / "postprocessing")
    findings = check_repo(repository)
    assert {finding.where for finding in findings} == {
        "ensemble/config.pbtxt, step postprocessing", "ensemble_streaming/config.pbtxt, step postprocessing"
    }  # fmt: skip


def test_a_folder_that_triton_would_take_for_a_model_is_found(repository):
    (repository / "notes").mkdir()
    assert the_finding(repository).where == "notes/config.pbtxt"


def test_a_model_without_code_or_version_is_found(repository):
    (repository / "tensorrt_llm_bls" / "1" / "model.py").unlink()
    shutil.rmtree(repository / "ensemble" / "1")
    assert {finding.found for finding in check_repo(repository)} == {"no model.py", "no version folder"}


WEIGHTS = "fastertransformer/1/1-gpu"


def test_a_truncated_weight_file_is_found(repository):
    path = repository / WEIGHTS / "model.wte.bin"
    path.write_bytes(path.read_bytes()[:-4])
    finding = the_finding(repository)
    assert "model.wte.bin holds 63,548 bytes; model.wte (331, 48) fp32 needs 63,552" in finding.found


def test_missing_weights_are_found(repository):
    shutil.rmtree(repository / WEIGHTS)
    assert "1-gpu is missing" in the_finding(repository).found


def test_a_flipped_bit_is_found_by_reading_checksums_only(repository):
    path = repository / WEIGHTS / "model.wte.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    assert check_repo(repository) == []
    assert "model.wte.bin has SHA-256" in the_finding(repository, checksums=True).found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("end_id = 2", "end_id = 3", "[llama] end_id is 3 (was 2)"),
        ("start_id = 1", "start_id = 0", "[llama] start_id is 0 (was 1)"),
        (
            "start_id = 1",
            "num_tasks = 1\nprompt_learning_type = 3\nstart_id = 1",
            "[llama] num_tasks is 1 (was nothing); [llama] prompt_learning_type is 3 (was nothing); "
            "[task_0] prompt_length is 2 (was nothing); [task_0] task_name is t (was nothing)",
        ),
    ],
)
def test_edits_of_config_ini_that_the_guide_names_are_a_warning(repository, old, new, said):
    path = repository / WEIGHTS / "config.ini"
    edit(path, old, new)
    if "num_tasks" in new:
        path.write_text(path.read_text() + "[task_0]\ntask_name = t\nprompt_length = 2\n")
    for finding in (the_finding(repository), *doctor_findings(repository, full=False)):
        assert (finding.where, finding.severity, finding.found) == ("config.ini", "warning", said)


def test_another_manifest_than_was_compared_excuses_no_edit(repository):
    """It holds what config.ini was."""
    edit(repository / WEIGHTS / "config.ini", "end_id = 2", "end_id = 3")
    edit(repository / WEIGHTS / "manifest.json", '"end_id": "2"', '"end_id": "3"')
    findings = check_repo(repository)
    assert {(finding.where, finding.severity) for finding in findings} == {
        ("config.ini", "error"), ("manifest.json", "error"),
    }  # fmt: skip


@pytest.mark.parametrize("value", ["-7", "99999"])
def test_an_id_outside_the_vocabulary_is_an_error(repository, value):
    edit(repository / WEIGHTS / "config.ini", "end_id = 2", f"end_id = {value}")
    finding = the_finding(repository)
    assert finding.severity == "error" and f"end_id = {value}; wanted 0 to" in finding.found


def test_a_setting_of_the_network_that_differs_from_the_manifest_is_found(repository):
    edit(repository / WEIGHTS / "config.ini", "layernorm_eps = 1e-06", "layernorm_eps = 1e-05")
    finding = the_finding(repository)
    assert finding.severity == "error"
    assert "layernorm_eps is 1e-05; the weights were converted with 1e-06" in finding.found


def test_half_precision_over_bf16_weights_is_warned_of(tmp_path):
    source = save(tiny_llama(), tmp_path / "hf")
    settings = {"data_type": "fp16"}
    repository = build_repo(source, tmp_path / "repo", dtype="bf16", engine_settings=settings)
    assert the_finding(repository).found == "data_type fp16 over bf16 weights"


TOKENIZER = "preprocessing/1/tokenizer/tokenizer.json"


def test_a_missing_tokenizer_is_found(repository):
    (repository / TOKENIZER).unlink()
    findings = check_repo(repository)
    assert [finding.severity for finding in findings] == ["error", "warning"]
    assert TOKENIZER in findings[0].where


def test_a_tokenizer_that_cuts_prompts_is_found(repository):
    tokenizer = Tokenizer.from_file(str(repository / TOKENIZER))
    tokenizer.enable_truncation(512)
    tokenizer.save(str(repository / TOKENIZER))
    assert {finding.found for finding in check_repo(repository)} == {
        "truncation or padding", "other bytes than were compared with transformers"
    }  # fmt: skip


def test_a_repository_without_proof_is_warned_of(repository):
    (repository / "PARITY.json").unlink()
    finding = the_finding(repository)
    assert (finding.severity, finding.where) == ("warning", "PARITY.json")


def test_the_proof_of_a_repository_without_a_tokenizer_is_checked(repository):
    for name in {path.parent.name for path in repository.glob("*/config.pbtxt")}:
        if not name.startswith("fastertransformer"):
            shutil.rmtree(repository / name)
    for config in repository.glob("*/config.pbtxt"):
        assert "tokenizer_dir" not in config.read_text()
    assert check_repo(repository) == []
    edit(repository / WEIGHTS / "config.ini", "end_id = 2", "end_id = 3")
    assert the_finding(repository).found == "[llama] end_id is 3 (was 2)"


@pytest.mark.parametrize("change", [{"passed": False}, {"format": "another"}])
def test_a_proof_that_did_not_pass_is_an_error(repository, change):
    path = repository / "PARITY.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert the_finding(repository).found == "no passed comparison"


def test_a_proof_that_is_no_json_is_an_error(repository):
    (repository / "PARITY.json").write_text("{")
    assert the_finding(repository).severity == "error"


def test_errors_come_before_warnings(repository):
    (repository / "PARITY.json").unlink()
    edit(repository / "preprocessing" / "config.pbtxt", "KIND_CPU", "KIND_GPU")
    assert [finding.severity for finding in check_repo(repository)] == ["error", "warning"]


def test_a_finding_reads_as_a_sentence(repository):
    edit(repository / "preprocessing" / "config.pbtxt", "KIND_CPU", "KIND_GPU")
    assert str(the_finding(repository)) == (
        "error: preprocessing/config.pbtxt: found instance_group KIND_GPU; wanted KIND_CPU. "
        "These models only talk to the engine."
    )


# ---------------------------------------------------------------- a repository that means harm

ENGINE_FILES = ["preprocessing/config.pbtxt", f"{WEIGHTS}/config.ini", f"{WEIGHTS}/manifest.json"]
ALL_FILES = [*ENGINE_FILES, TOKENIZER, "PARITY.json"]


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("kind", ["endless", "pipe", "device", "folder", "not a text"])
def test_a_file_of_another_kind_is_a_finding_and_never_a_wait(repository, name, kind):
    path = repository / name
    path.unlink()
    if kind == "endless":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"\xff\xfe\x00" * 10)
    started = time.process_time()
    findings = check_repo(repository)
    assert time.process_time() - started < 5
    assert any(finding.severity == "error" for finding in findings)
    assert all("\n" not in str(finding) and len(str(finding)) < 2000 for finding in findings)


HOSTILE_JSON = [
    "[" * 100_000,
    "{}",
    "[]",
    '{"format": "tridecode-parity-1", "passed": true}',
    '{"a":' * 50_000,
]


@pytest.mark.parametrize("name", ["PARITY.json", f"{WEIGHTS}/manifest.json", TOKENIZER])
@pytest.mark.parametrize("text", HOSTILE_JSON)
def test_json_of_any_shape_is_a_finding(repository, name, text):
    (repository / name).write_text(text)
    findings = check_repo(repository)
    assert findings and all("\n" not in str(finding) for finding in findings)


@pytest.mark.parametrize("ranks", [0, -3, 10**12])
def test_a_manifest_of_impossible_ranks_is_a_finding(repository, ranks):
    path = repository / WEIGHTS / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tensor_para_size": ranks}))
    assert any(finding.severity == "error" for finding in check_repo(repository))


ODD_SETTINGS = {
    "num_layer = 2": ["num_layer = 1000000000", f"num_layer = {'9' * 5000}", "num_layer = 0"],
    "head_num = 6": ["head_num = 0", "head_num = -6", "head_num = 99999999999999"],
    "layernorm_eps = 1e-06": ["layernorm_eps = nan", "layernorm_eps = inf"],
    "rope_theta = 10000.0": ["rope_theta = nan", "rope_theta = 1e999"],
    "rotary_embedding = 8": ["rotary_embedding = 0x7fffffff0"],
    "vocab_size = 331": ["vocab_size = 99999999999999999999"],
}


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, many in ODD_SETTINGS.items() for new in many])
def test_an_odd_value_of_config_ini_is_named_before_anything_is_made_of_it(repository, old, new):
    edit(repository / WEIGHTS / "config.ini", old, new)
    started = time.process_time()
    findings = check_repo(repository)
    assert time.process_time() - started < 5
    key = old.split()[0]
    told = [str(finding) for finding in findings if key in finding.found and "wanted" in finding.found]
    assert told and len(told[0]) < 800


def test_a_config_of_very_many_tensors_takes_no_time(repository):
    path = repository / "preprocessing" / "config.pbtxt"
    tensor = 'input {{ name: "{}" data_type: TYPE_FP32 dims: [ 1 ] optional: true }}\n'
    with open(path, "a") as file:
        file.writelines(tensor.format(number) for number in range(12_000))
    started = time.process_time()
    check_repo(repository)
    assert time.process_time() - started < 5


def test_names_cannot_write_to_the_terminal(repository):
    (repository / "evil\x1b[2Jname\nerror: all is lost").mkdir()
    (told,) = [str(finding) for finding in check_repo(repository)]
    assert "\x1b" not in told and "\n" not in told
