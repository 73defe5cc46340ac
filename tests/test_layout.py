"""The layout of the project: imports point downwards, every package is declared, and all implementations of
the operations have the same signatures."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest

from tests.clients.wheel import PYTHONS
from tridecode.kernels.cpu import Cpu
from tridecode.kernels.ops import Ops
from tridecode.kernels.reference import Reference
from tridecode.tools.serve.triton_install import OLDEST_PYTHON

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).parent.parent
FOLDERS = ("backend", "converters", "kernels", "model_repo_templates", "tools")

#: package prefix -> prefixes of ours that it may import; the longest prefix of a module counts
ALLOWED = {
    "tools": {"tools", "converters", "backend", "model_repo_templates", "kernels"},
    "converters": {
        "converters",
        "backend.base",
        "backend.configuration.engine_config",
        "backend.configuration.model_config",
        "backend.models",
        "backend.text",
        "backend.weights",
        "backend.wire.prompt_learning",
        "backend.wire.sampling_params",
        "backend.engine.offline",
        "backend.engine.device.resolved_settings",
        "kernels.formats.quantized",
        "kernels.formats.round_to_nearest",
    },
    "model_repo_templates": {
        "model_repo_templates",
        "backend.base.errors",
        "backend.configuration.engine_config",
        "backend.configuration.door_parameters",
        "backend.doors.contracts",
    },
    "kernels": {"kernels"},
    "backend.base": {"backend.base"},
    "backend.wire": {"backend.wire"},
    "backend.wire.structured_output": {"backend.base.errors"},
    "backend.chat": {"backend.chat", "backend.base"},
    "backend.configuration": {
        "backend.configuration",
        "backend.base",
        "backend.weights.layout",
        "backend.weights.quantization",
    },
    "backend.weights": set(),
    "backend.weights.layout": {"backend.base"},
    "backend.weights.draft_files": {"backend.base", "backend.configuration.model_config"},
    "backend.weights.pieces": set(),
    "backend.weights.directory_files": {"backend.weights.layout"},
    "backend.weights.quantization": {"backend.weights.layout"},
    "backend.weights.lora": {"backend.base", "backend.wire.messages"},
    "backend.weights.lora_tensors": {"backend.base", "backend.weights.lora"},
    "backend.weights.manifest": {
        "backend.base",
        "backend.configuration",
        "backend.models.config_ini",
        "backend.weights.layout",
    },
    "backend.weights.reader": {"backend.base", "backend.configuration", "backend.models", "backend.weights"},
    "backend.models": {
        "backend.models",
        "backend.base",
        "backend.configuration",
        "backend.weights.layout",
        "backend.weights.quantization",
        "backend.wire.prompt_learning",
        "backend.wire.sampling_params",
        "kernels.operands",
        "kernels.ops",
        "kernels.formats.quantized",
        "kernels.formats.round_to_nearest",
    },
    "backend.doors.contracts": {"backend.doors.contracts", "backend.base", "backend.wire.sampling_params"},
    "backend.doors": {
        "backend.doors",
        "backend.base",
        "backend.configuration",
        "backend.service",
        "backend.text",
        "backend.wire",
    },
    "backend.batches": {"backend.batches", "backend.base"},
    "backend.front": {
        "backend.front",
        "backend.base",
        "backend.batches",
        "backend.chat",
        "backend.configuration",
        "backend.models.config_ini",
        "backend.service",
        "backend.supervisor.processes",
        "backend.supervisor.runtime_dir",
        "backend.supervisor.state_file",
        "backend.text",
        "backend.weights.lora",
        "backend.wire",
    },
    "backend.service": {
        "backend.service",
        "backend.base",
        "backend.chat",
        "backend.supervisor.launch",
        "backend.text",
        "backend.wire",
    },
    "backend.text": {"backend.text", "backend.base.errors", "backend.wire.messages"},
    "backend.supervisor": {
        "backend.supervisor",
        "backend.base",
        "backend.configuration",
        "backend.models.config_ini",
        "backend.nodes",
        "backend.wire.messages",
    },
    "backend.nodes": {
        "backend.nodes",
        "backend.base",
        "backend.configuration",
        "backend.supervisor",
        "backend.wire.messages",
    },
    "backend.engine": {
        "backend.engine",
        "backend.base",
        "backend.configuration",
        "backend.models",
        "backend.nodes",
        "backend.supervisor.processes",
        "backend.supervisor.rank_link",
        "backend.text.vocabulary_match",
        "backend.weights",
        "backend.wire",
        "kernels",
    },
    "backend.engine.grammars": {
        "backend.engine.grammars",
        "backend.base",
        "backend.text",
        "backend.wire.structured_output",
    },
}

#: modules that must not import torch or transformers, directly or through another module of ours
TORCH_FREE = (
    "backend.batches",
    "backend.doors",
    "backend.front",
    "backend.service",
    "backend.supervisor",
    "backend.text",
    "backend.wire.messages",
    "backend.chat",
    "backend.wire.prompt_learning",
    "backend.wire.prompt_tables",
    "backend.wire.sampling_params",
    "backend.wire.structured_output",
    "backend.engine.prompt_tables.book",
    "backend.engine.prompt_tables.plan",
    "backend.engine.adapters.table",
    "backend.engine.cache.cache_manager",
    "backend.engine.cache.block_index",
    "backend.engine.grammars",
    "backend.engine.schedule",
    "backend.engine.step.plan",
    "backend.engine.parts",
    "backend.engine.door_socket",
)


def modules() -> dict[str, Path]:
    """Dotted name below `tridecode` -> file."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, for_types: bool = False) -> tuple[set[str], set[str]]:
    """Return (modules of ours without the leading tridecode, top-level names of others) that a file imports,
    in functions, too. for_types: those under `if TYPE_CHECKING` count as well."""
    ours, others = set(), set()
    tree = ast.parse(path.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
        if not for_types
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


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for target in graph[module]:
            if target not in number:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], number[target])
        if lowest[module] == number[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in graph:
        if module not in number:
            visit(module)
    return found


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(graph) == [["d", "e"], ["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports in functions and under `if TYPE_CHECKING` count: they hide circles, and do not open them."""
    known = modules()
    graph = {
        module: {resolved(name, known) for name in imports(path, for_types=True)[0]} - {module, ""}
        for module, path in known.items()
    }
    assert len(graph) > 400 and sum(map(len, graph.values())) > 2000
    assert circles(graph) == []


def test_only_doors_import_triton_and_the_service_asks_for_no_parent_process() -> None:
    for module, path in modules().items():
        if module.startswith("backend.") and not module.startswith("backend.doors"):
            assert "triton_python_backend_utils" not in imports(path)[1], module
        if module.startswith("backend.service"):
            assert "getppid" not in path.read_text(), module


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
def test_the_oldest_python_is_the_same_everywhere() -> None:
    """Its wheel is tested, serve refuses older doors, and no dependency is excluded on any Python."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, oldest = settings["project"], ".".join(map(str, OLDEST_PYTHON))
    assert project["requires-python"] == f">={oldest}"
    assert settings["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert PYTHONS[0] == oldest
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    assert not [line for line in [*project["dependencies"], *extras] if "python_version" in line]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_pyproject_lists_every_package() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        "tridecode." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    present.remove("tridecode.tools.package")  # its folder is that of `tridecode` itself
    assert listed == present | {"tridecode"}


#: folders whose files are one list: a family, a contract or a template each
_LISTS = {"backend/models", "converters/families", "model_repo_templates"}


def test_no_folder_has_more_files_than_a_reader_can_hold() -> None:
    """Folders of code have at most 20 files, and the backend none outside of them."""
    loose = [path.name for path in (ROOT / "backend").glob("*.py") if path.name != "__init__.py"]
    assert loose == []
    for folder in {path.parent for top in FOLDERS for path in (ROOT / top).rglob("*.*") if path.is_file()}:
        name = folder.relative_to(ROOT).as_posix()
        if "__pycache__" in name or "results" in name or "/lib" in name or name in _LISTS:
            continue
        count = sum(path.is_file() for path in folder.iterdir() if path.name != "__init__.py")
        assert count <= 20, f"{name} has {count} files"


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    """Python files have at most 350 lines, CUDA files at most 450."""
    most = {".py": 350, ".cu": 450, ".cuh": 450, ".h": 450}
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in most
    }
    assert len(lines) > 500
    for name, count in lines.items():
        limit = most[Path(name).suffix]
        assert count <= limit, f"{name} has {count} lines; wanted at most {limit}"


@pytest.mark.parametrize("implementation", [Reference, Cpu])
def test_implementations_have_every_operation_with_its_signature(implementation: type) -> None:
    operations = [name for name in vars(Ops) if not name.startswith("_") and callable(getattr(Ops, name))]
    assert len(operations) > 8
    for name in operations:
        assert str(inspect.signature(getattr(implementation, name))) == str(
            inspect.signature(getattr(Ops, name))
        )
