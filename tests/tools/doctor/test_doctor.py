"""`tridecode doctor` finds and reports each misconfiguration of a repository."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests.checkpoints import save, tiny_llama
from tests.tools.doctor.doctors import CPU_MACHINE, GIB, GPU_MACHINE, gpu
from tridecode.backend.weights.reader import ManifestFile
from tridecode.tools.build_repo.build import build_repo
from tridecode.tools.checks import parameter_names
from tridecode.tools.checks.findings import Finding
from tridecode.tools.cli import app
from tridecode.tools.doctor.diagnosis import diagnose
from tridecode.tools.doctor.fit import Place
from tridecode.tools.doctor.machine import Machine
from tridecode.tools.doctor.repository import sample


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


def value(key: str, text: str) -> str:
    return f'"{key}" value: {{ string_value: "{text}"'


def findings(repository: Path, machine: Machine = CPU_MACHINE, **options) -> list[Finding]:
    return diagnose(repository, machine=machine, **options).findings


def test_a_fresh_repository_on_a_healthy_machine_has_no_findings(repository):
    found = diagnose(repository, machine=CPU_MACHINE)
    assert found.findings == []
    (memory,) = found.fits.values()
    assert memory.fits and memory.ranks[0].scratch == 0


def test_a_wrong_reference_of_shadow_runs_is_found(repository):
    path = repository / "fastertransformer" / "config.pbtxt"
    edit(path, value("shadow_share", "0.0"), value("shadow_share", "0.1"))
    (finding,) = [one for one in findings(repository) if "shadow_share" in one.found]
    assert finding.severity == "error" and "nothing of" in finding.found
    edit(path, value("int8_mode", "0"), value("int8_mode", "1"))
    found = diagnose(repository, machine=CPU_MACHINE)
    assert found.findings == []
    (memory,) = found.fits.values()
    assert memory.ranks[0].background["shadow runs"] > 0
    edit(path, value("shadow_weights", "none"), value("shadow_weights", "../absent"))
    (finding,) = findings(repository)
    assert finding.severity == "error" and "shadow_weights names" in finding.found
    edit(path, value("shadow_weights", "../absent"), value("shadow_weights", "1/1-gpu"))
    assert findings(repository) == []


FT = "fastertransformer"
GPU_16 = replace(GPU_MACHINE, cuda=gpu(capability=75, name="Tesla T4", memory=16 * GIB))
#: trap: (model, parameter, old value, new value, machine, severity, part of the finding, part of the advice)
SETTINGS = {
    "bf16 on a GPU without it": (FT, "data_type", "fp32", "bf16", GPU_16, "error", "ability 7.5", "fp16"),
    "float32 on a GPU": (FT, "data_type", "fp32", "fp32", GPU_MACHINE, "warning", "fp32 on a GPU", "half"),
    "16 bit on a CPU": (FT, "data_type", "fp32", "fp16", CPU_MACHINE, "warning", "fp16 on a CPU", "fp32"),
    "cuda without a GPU": (FT, "device", "auto", "cuda", CPU_MACHINE, "error", "without a GPU", "auto"),
    "more threads than CPUs": (FT, "num_threads", "0", "64", CPU_MACHINE, "warning", "64 on 32 CPUs", "to 0"),
    "not one block": (FT, "cache_bytes", "auto", "100", CPU_MACHINE, "error", "cache_bytes 100 B", "auto"),
    "stages without layers": (
        FT, "pipeline_para_size", "1", "3", CPU_MACHINE, "error", "pipeline_para_size = 3", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", SETTINGS)
def test_each_setting_that_a_machine_does_not_run_is_found(repository, trap):
    model, key, old, new, machine, severity, found, fix = SETTINGS[trap]
    edit(repository / model / "config.pbtxt", value(key, old), value(key, new))
    matching = [finding for finding in findings(repository, machine) if found in finding.found]
    assert matching and {finding.severity for finding in matching} == {severity}
    assert any(fix in finding.fix for finding in matching)


def test_more_ranks_than_gpus_is_a_problem(repository):
    config = repository / FT / "config.pbtxt"
    edit(config, value("tensor_para_size", "1"), value("tensor_para_size", "2"))
    edit(config, value("data_type", "fp32"), value("data_type", "bf16"))
    (finding,) = findings(repository, GPU_MACHINE)
    assert finding.severity == "error"
    assert finding.found == (
        "tensor_para_size 2 x pipeline_para_size 1 needs 2 GPUs; the machine has 1: tensor_para_size 1 "
        "would fit"
    )
    assert findings(repository, GPU_MACHINE, gpus=2) == []


def test_two_instances_want_gpus_for_two_engines(repository):
    config = repository / FT / "config.pbtxt"
    edit(config, value("data_type", "fp32"), value("data_type", "bf16"))
    edit(config, "count: 1", "count: 2")
    (finding,) = [one for one in findings(repository, GPU_MACHINE) if one.severity == "error"]
    assert finding.found == (
        "2 engines (instance_group) of tensor_para_size 1 x pipeline_para_size 1 need 2 GPUs; the machine "
        "has 1: 1 instance(s) would fit"
    )
    assert {one.severity for one in findings(repository, GPU_MACHINE, gpus=2)} == {
        "warning"
    }  # of other doors


def test_two_models_on_one_gpu_are_warned_of(repository):
    config = repository / FT / "config.pbtxt"
    edit(config, value("data_type", "fp32"), value("data_type", "bf16"))
    shutil.copytree(repository / FT, repository / "second")
    second = repository / "second" / "config.pbtxt"
    edit(second, f'name: "{FT}"', 'name: "second"')
    edit(second, value("engine_model", FT), value("engine_model", "second"))
    (finding,) = findings(repository, GPU_MACHINE, gpus=2)
    assert (finding.severity, finding.where) == ("warning", "second/config.pbtxt")
    assert finding.found == f"GPU 0, which the engine of {FT}/config.pbtxt takes too"
    edit(second, value("devices", "auto"), value("devices", "1"))
    assert findings(repository, GPU_MACHINE, gpus=2) == []


def test_supposed_gpus_need_no_gpu(repository):
    edit(repository / FT / "config.pbtxt", value("data_type", "fp32"), value("data_type", "bf16"))
    found = diagnose(repository, machine=CPU_MACHINE, gpu_memory=80 * GIB, gpus=2)
    assert found.findings == []
    (memory,) = found.fits.values()
    assert memory.place == Place("cuda", 80 * GIB, 2) and memory.ranks[0].scratch > 64 << 20


def damage(repository: Path, offset: int) -> list[str]:
    """Flip a bit of every weight file at `offset` (negative: from the end). Return their names."""
    weights = repository / FT / "1" / "1-gpu"
    for path in weights.glob("*.bin"):
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
    return [path.name for path in weights.glob("*.bin")]


@pytest.mark.parametrize("full", [False, True])
def test_every_changed_weight_file_is_found(repository, full):
    names = damage(repository, 0)
    found = [finding for finding in findings(repository, full=full) if "SHA-256" in finding.found]
    assert all(finding.severity == "error" for finding in found)
    assert {next(name for name in names if name in finding.found) for finding in found} == set(names)


def test_without_sampled_digests_some_files_are_read_whole(repository):
    manifest = repository / FT / "1" / "1-gpu" / "manifest.json"
    manifest.write_text(re.sub(r'"sample": "\w*"', '"sample": ""', manifest.read_text()))
    names = damage(repository, -1)
    found = [finding for finding in findings(repository) if "SHA-256" in finding.found]
    assert len(found) == 16 < len(names)


def test_a_sample_has_the_first_and_the_last_file_and_a_bound():
    files = [ManifestFile(f"{index}.bin", 1 << 20, "") for index in range(500)]
    chosen = sample(files)
    assert len(chosen) == 16 and chosen[0] == files[0] and chosen[-1] == files[-1]
    large = [ManifestFile(f"{index}.bin", 300 << 20, "") for index in range(40)]
    assert sample(large) == large[:1]
    assert sample(files[:3]) == files[:3] and sample([]) == []


def test_a_misspelt_parameter_comes_with_the_nearest_known_one(repository):
    edit(repository / FT / "config.pbtxt", '"max_sequences"', '"max_seqences"')
    edit(repository / "preprocessing" / "config.pbtxt", '"tokenizer_dir"', '"tokeniser_dir"')
    fixes = {finding.found: finding.fix for finding in findings(repository)}
    assert "did you mean max_sequences?" in fixes["parameter max_seqences"]
    assert "did you mean tokenizer_dir?" in fixes["parameter tokeniser_dir"]


def test_a_name_that_is_like_nothing_is_to_be_removed():
    assert parameter_names.advice("frobnicate", engine=True) == "Nothing reads it; remove it."
    assert parameter_names.nearest("Data-Type", engine=True) == "data_type"


def test_a_streaming_model_that_does_not_stream_is_warned_of(repository):
    edit(repository / "fastertransformer_streaming" / "config.pbtxt", "decoupled: true", "decoupled: false")
    found = [finding.found for finding in findings(repository)]
    assert "decoupled false in a model named fastertransformer_streaming" in found
    assert "decoupled, with no step that is" in found  # its ensemble


def test_a_missing_member_of_an_ensemble_is_a_problem(repository):
    shutil.rmtree(repository / "postprocessing")
    assert any("no such model" in finding.found for finding in findings(repository))


def test_a_damaged_repository_ends_in_findings_not_in_an_error(repository):
    (repository / FT / "config.pbtxt").write_text("name: {{{")
    (repository / FT / "1" / "1-gpu" / "config.ini").unlink()
    found = diagnose(repository, machine=CPU_MACHINE)
    assert found.problems and not found.fits


@pytest.mark.parametrize(
    "name", [f"{FT}/config.pbtxt", f"{FT}/1/1-gpu/config.ini", f"{FT}/1/1-gpu/manifest.json"]
)
@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_file_is_not_read(repository, name):
    (repository / name).unlink()
    os.mkfifo(repository / name)
    assert diagnose(repository, machine=CPU_MACHINE).problems


# ---------------------------------------------------------------- the command


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "160"})


@pytest.fixture
def healthy(monkeypatch):
    """Run the command on CPU_MACHINE, because the real machine may have findings."""
    from tridecode.tools.doctor import diagnosis

    monkeypatch.setattr(diagnosis, "inspect_machine", lambda repository: CPU_MACHINE)


def test_the_command_ends_with_0_without_problems(repository, healthy):
    done = run(str(repository))
    assert done.exit_code == 0, done.output
    assert "no GPU: CPU path" in done.output and "weights and tables" in done.output
    assert "problems: 0, warnings: 0" in done.output


def test_the_command_ends_with_1_with_problems_and_0_with_warnings(repository, healthy):
    edit(repository / FT / "config.pbtxt", value("num_threads", "0"), value("num_threads", "64"))
    done = run(str(repository))
    assert done.exit_code == 0 and "Set num_threads to 0" in done.output
    edit(repository / FT / "config.pbtxt", value("device", "auto"), value("device", "cuda"))
    done = run(str(repository))
    assert done.exit_code == 1 and "problems: 1, warnings: 1" in done.output


def test_json_has_machine_memory_and_findings(repository, healthy):
    done = run(str(repository), "--json", "--gpu-memory", "80GiB", "--gpus", "2")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    (memory,) = found["memory"].values()
    place = {"kind": "cuda", "memory": 80 * GIB, "devices": 2, "capability": None, "engines": 1}
    assert memory["place"] == place
    assert memory["ranks"][0]["fixed"] == sum(
        memory["ranks"][0][key] for key in ("weights", "workspace", "scratch")
    )
    assert found["machine"]["cpus"] == 32
    assert [finding["found"] for finding in found["findings"]] == ["data_type fp32 on a GPU"]
    assert (found["problems"], found["warnings"]) == (0, 1)


def test_without_a_repository_this_machine_is_examined():
    done = run("--json")
    found = json.loads(done.stdout)
    assert found["repository"] is None and found["memory"] == {}
    assert found["machine"]["memory"] == psutil.virtual_memory().total


def test_an_absent_repository_is_a_problem(tmp_path, healthy):
    done = run(str(tmp_path / "absent"))
    assert done.exit_code == 1 and "no directory" in done.output


def test_a_wrong_size_is_one_line_and_exit_code_2():
    done = run("--gpu-memory", "80 apples")
    assert done.exit_code == 2 and "wanted a size, e.g. 80GiB" in done.output
