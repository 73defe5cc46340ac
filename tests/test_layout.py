"""The layout of the project: imports point downwards, every package is declared, and all implementations of
the operations have the same signatures."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest

from tridecode.kernels.cpu import Cpu
from tridecode.kernels.ops import Ops
from tridecode.kernels.reference import Reference

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).parent.parent
FOLDERS = ("backend", "converters", "kernels", "model_repo_templates", "tools")

#: package prefix -> prefixes of ours that it may import; the longest prefix of a module counts
ALLOWED = {
    "tools": {"tools", "converters", "backend", "model_repo_templates", "kernels"},
    "converters": {
        "converters",
        "backend.config",
        "backend.errors",
        "backend.models",
        "backend.weight_layout",
        "backend.weights",
        "backend.byte_budget",
        "backend.host_memory",
        "backend.lora",
        "backend.lora_tensors",
        "backend.manifest",
        "backend.text",
        "backend.prompt_learning",
        "backend.quantization",
        "backend.sampling_params",
        "backend.engine.offline",
        "backend.engine.settings",
        "kernels.quantized",
        "kernels.round_to_nearest",
    },
    "model_repo_templates": {
        "model_repo_templates",
        "backend.config",
        "backend.door_parameters",
        "backend.doors.contracts",
        "backend.errors",
    },
    "kernels": {"kernels"},
    "backend.errors": set(),
    "backend.sampling_params": set(),
    "backend.prompt_learning": set(),
    "backend.prompt_tables": set(),
    "backend.messages": {"backend.prompt_learning", "backend.sampling_params"},
    "backend.beam_tree": {"backend.messages"},
    "backend.chat_templates": {"backend.errors"},
    "backend.chat_template_child": set(),
    "backend.pauses": set(),
    "backend.taken_requests": set(),
    "backend.log_format": set(),
    "backend.threads": set(),
    "backend.byte_budget": set(),
    "backend.host_memory": set(),
    "backend.weight_pieces": set(),
    "backend.door_parameters": {"backend.errors"},
    "backend.config": {
        "backend.door_parameters",
        "backend.errors",
        "backend.quantization",
        "backend.weight_layout",
    },
    "backend.directory_files": {"backend.weight_layout"},
    "backend.weight_layout": {"backend.errors"},
    "backend.quantization": {"backend.weight_layout"},
    "backend.lora": {"backend.errors", "backend.messages"},
    "backend.lora_tensors": {"backend.errors", "backend.lora"},
    "backend.manifest": {
        "backend.config",
        "backend.errors",
        "backend.models.config_ini",
        "backend.weight_layout",
    },
    "backend.weights": {
        "backend.config",
        "backend.directory_files",
        "backend.errors",
        "backend.manifest",
        "backend.models",
        "backend.weight_layout",
        "backend.weight_pieces",
    },
    "backend.engine_config_file": {"backend.errors"},
    "backend.engine_instances": {"backend.errors"},
    "backend.rank_gpus": {"backend.engine_instances", "backend.errors"},
    "backend.models": {
        "backend.models",
        "backend.config",
        "backend.errors",
        "backend.prompt_learning",
        "backend.quantization",
        "backend.sampling_params",
        "backend.weight_layout",
        "kernels.ops",
        "kernels.quantized",
        "kernels.round_to_nearest",
    },
    "backend.doors.contracts": {"backend.doors.contracts", "backend.errors", "backend.sampling_params"},
    "backend.doors": {
        "backend.beam_tree",
        "backend.config",
        "backend.door_parameters",
        "backend.doors",
        "backend.engine_instances",
        "backend.errors",
        "backend.log_format",
        "backend.messages",
        "backend.pauses",
        "backend.prompt_learning",
        "backend.prompt_tables",
        "backend.sampling_params",
        "backend.supervisor.launch",
        "backend.taken_requests",
        "backend.text",
    },
    "backend.text": {"backend.text", "backend.errors", "backend.messages"},
    "backend.supervisor": {
        "backend.supervisor",
        "backend.config",
        "backend.engine_config_file",
        "backend.engine_instances",
        "backend.errors",
        "backend.log_format",
        "backend.messages",
        "backend.models.config_ini",
        "backend.nodes",
        "backend.pauses",
        "backend.rank_gpus",
        "backend.threads",
    },
    "backend.nodes": {
        "backend.nodes",
        "backend.engine_config_file",
        "backend.engine_instances",
        "backend.errors",
        "backend.messages",
        "backend.rank_gpus",
        "backend.supervisor",
    },
    "backend.engine": {
        "backend.engine",
        "backend.nodes",
        "backend.beam_tree",
        "backend.config",
        "backend.engine_config_file",
        "backend.errors",
        "backend.byte_budget",
        "backend.host_memory",
        "backend.lora",
        "backend.lora_tensors",
        "backend.manifest",
        "backend.log_format",
        "backend.messages",
        "backend.models",
        "backend.pauses",
        "backend.prompt_learning",
        "backend.quantization",
        "backend.prompt_tables",
        "backend.rank_gpus",
        "backend.sampling_params",
        "backend.supervisor.processes",
        "backend.supervisor.rank_link",
        "backend.weight_layout",
        "backend.weights",
        "kernels",
    },
}

#: modules that must not import torch or transformers, directly or through another module of ours
TORCH_FREE = (
    "backend.doors",
    "backend.supervisor",
    "backend.text",
    "backend.messages",
    "backend.chat_templates",
    "backend.prompt_learning",
    "backend.prompt_tables",
    "backend.sampling_params",
    "backend.engine.scheduler",
    "backend.engine.prompts",
    "backend.engine.prompt_plan",
    "backend.engine.adapters",
    "backend.engine.admission",
    "backend.engine.cache_manager",
    "backend.engine.planner",
    "backend.engine.block_pool",
    "backend.engine.sequence",
    "backend.engine.plan",
    "backend.engine.front",
)


def modules() -> dict[str, Path]:
    """Dotted name below `tridecode` -> file."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path) -> tuple[set[str], set[str]]:
    """(modules of ours without the leading tridecode, top-level names of others) that a file imports anywhere
    but under `if TYPE_CHECKING`."""
    ours, others = set(), set()
    tree = ast.parse(path.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("tridecode."):
                ours.add(name.removeprefix("tridecode."))
            elif name != "tridecode":
                others.add(name.split(".")[0])
    return ours, others


def resolved(name: str, known: dict[str, Path]) -> str:
    """The module that an imported dotted name lies in."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def layer_of(module: str) -> str:
    fitting = [layer for layer in ALLOWED if module == layer or module.startswith(layer + ".")]
    assert fitting, f"{module} is in no layer of ALLOWED"
    return max(fitting, key=len)


def test_imports_point_downwards() -> None:
    known = modules()
    wrong = []
    for module, path in known.items():
        if module in FOLDERS + ("backend",):
            continue
        allowed = ALLOWED[layer_of(module)]
        for name in imports(path)[0]:
            target = resolved(name, known)
            if not any(target == prefix or target.startswith(prefix + ".") for prefix in allowed):
                wrong.append(f"{path.relative_to(ROOT)} imports tridecode.{target}")
    assert not wrong, "\n".join(wrong)


def test_doors_and_scheduler_are_free_of_torch() -> None:
    known = modules()
    graph = {module: imports(path) for module, path in known.items()}

    def reaches(module: str, seen: set[str]) -> str | None:
        if {"torch", "transformers"} & graph[module][1]:
            return module
        for name in graph[module][0]:
            target = resolved(name, known)
            if target and target not in seen:
                seen.add(target)
                through = reaches(target, seen)
                if through:
                    return f"{module} -> {through}"
        return None

    for module in known:
        if any(module == free or module.startswith(free + ".") for free in TORCH_FREE):
            assert reaches(module, {module}) is None, reaches(module, {module})


def test_the_text_core_needs_the_standard_library_and_tokenizers_only() -> None:
    core = {name: path for name, path in modules().items() if name.startswith("backend.text")}
    assert len(core) > 3
    for path in core.values():
        assert imports(path)[1] <= {*sys.stdlib_module_names, "tokenizers"}, path


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_environment_of_a_door_has_all_that_doors_import() -> None:
    """An environment with the dependencies and without an extra is Triton's stub's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"pyzmq": "zmq", "protobuf": "google"}
    found = [re.split("[<>=]", requirement)[0] for requirement in project["dependencies"]]
    installed = {names.get(name, name) for name in found}
    known = modules()
    reached = {module for module in known if module.startswith("backend.doors")}
    todo = list(reached)
    while todo:
        ours, others = imports(known[todo.pop()])
        assert others <= {*sys.stdlib_module_names, *installed, "triton_python_backend_utils"}, others
        targets = {resolved(name, known) for name in ours} - reached - {""}
        reached |= targets
        todo += targets


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_pyproject_lists_every_package() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        "tridecode." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == present


@pytest.mark.parametrize("implementation", [Reference, Cpu])
def test_implementations_have_every_operation_with_its_signature(implementation: type) -> None:
    operations = [name for name in vars(Ops) if not name.startswith("_") and callable(getattr(Ops, name))]
    assert len(operations) > 8
    for name in operations:
        assert str(inspect.signature(getattr(implementation, name))) == str(
            inspect.signature(getattr(Ops, name))
        )
