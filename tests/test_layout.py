"""Which file may import which, read from the import statements; and the table of files in docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm", "peer", "client", "export")
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TOP = {module_name(path) for path in SOURCES if path.is_relative_to("swarm/app")} | {"swarm.__main__"}
OPENVINO = ("swarm/engine/", "peer/loading/self_test.py", "export/", "swarm/app/doctor.py")
GENAI = ("client/generation/tokenizer.py", "export/", "swarm/app/doctor.py")
MAX_LINES = 400
MAX_FILES = 14

LEVELS = {
    # package -> its levels, the top one first: a file imports from its own folder or from lower levels
    "swarm": [
        "__main__",
        "app",
        "routing",
        "discovery",
        "engine",
        "process",
        "transport",
        "wire",
        "model",
        "sampling",
        "errors",
    ],
    "swarm.engine": [
        "choice",
        "paged static",
        "compose",
        "stateful",
        "ledger",
        "steps device",
        "base compile_cache memory",
    ],
    "peer": [
        "cli",
        "lifecycle",
        "announcing",
        "loading",
        "serving",
        "sessions",
        "batching connections",
        "report config",
    ],
    "client": [
        "gateway cli",
        "progress",
        "client",
        "generation",
        "metrics",
        "speculation inspector",
        "pipeline options",
        "config events",
    ],
    "client.gateway": [
        "run",
        "app",
        "completions",
        "metrics swarm_view",
        "admission model_pool",
        "http",
        "api config",
        "keys",
    ],
    "export": ["cli inspect_cli", "request progress", "package", "verify", "checkpoint", "graph", "sources"],
    "reproduction": [
        "__main__",
        "engine network speculation serving export",
        "bounds",
        "harness",
        "models",
        "experiment",
    ],
}


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file names in an import statement, wherever it stands."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""
            # `from swarm.discovery import dht` names a module too
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers_of(*names: str) -> set[str]:
    return {
        str(path)
        for path in SOURCES
        if any(module == name or module.startswith(f"{name}.") for module in imports_of(path) for name in names)
    }


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) <= MAX_LINES


def upward_imports(package: str) -> Iterator[str]:
    """Imports inside `package` that go up, or across to another folder of the same level."""
    level_of = {name: number for number, names in enumerate(LEVELS[package]) for name in names.split()}
    folder = ROOT / package.replace(".", "/")
    for path in sorted(folder.rglob("*.py")):
        here = path.relative_to(folder).with_suffix("").parts[0]
        if here == "__init__":
            continue
        assert here in level_of, f"{package} has no level for {here}"
        for module in imports_of(path.relative_to(ROOT)):
            if module.startswith(f"{package}."):
                there = module.removeprefix(f"{package}.").partition(".")[0]
                is_down = level_of.get(there, len(level_of)) > level_of[here]
                if there != here and there in level_of and not is_down:
                    yield f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("package", LEVELS)
def test_imports_go_down_the_levels_of_a_package(package: str) -> None:
    assert sorted(set(upward_imports(package))) == []


@pytest.mark.parametrize("folder", sorted({str(path.parent) for path in SOURCES} | {"reproduction"}))
def test_a_folder_holds_about_a_dozen_files(folder: str) -> None:
    files = [path for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MAX_FILES


@pytest.mark.parametrize("package", ["peer", "client", "export"])
def test_peer_client_and_export_import_only_swarm(package: str) -> None:
    others = {"peer", "client", "export"} - {package}
    for path in SOURCES:
        if path.parts[0] == package:
            assert not {module.partition(".")[0] for module in imports_of(path)} & others, path


def test_swarm_imports_neither_peer_nor_client_nor_export() -> None:
    for path in SOURCES:
        if path.parts[0] == "swarm" and module_name(path) not in TOP:
            assert not {module.partition(".")[0] for module in imports_of(path)} & {"peer", "client", "export"}, path


def test_no_file_imports_the_commands_of_swarm_app() -> None:
    for path in SOURCES:
        if module_name(path) not in TOP:
            assert not TOP & set(imports_of(path)), path


def test_hivemind_is_imported_in_one_file() -> None:
    assert importers_of("hivemind") == {"swarm/discovery/dht.py"}


def test_openvino_is_imported_where_graphs_are() -> None:
    assert {path for path in importers_of("openvino") if not path.startswith(OPENVINO)} == set()
    assert {path for path in importers_of("openvino_genai") if not path.startswith(GENAI)} == set()


def test_torch_and_its_ecosystem_are_imported_by_export_only() -> None:
    assert {
        path for path in importers_of("torch", "transformers", "optimum") if not path.startswith("export/")
    } == set()


def test_the_wire_does_no_io() -> None:
    wire = {path for path in importers_of("asyncio", "socket", "ssl", "selectors") if path.startswith("swarm/wire/")}
    assert wire == set()


def test_no_package_imports_tests_or_reproduction() -> None:
    assert importers_of("tests", "reproduction") == set()


def loaded_by(statement: str, *suspects: str) -> set[str]:
    """Which of `suspects` a fresh interpreter has loaded after `statement`."""
    code = f"import sys\n{statement}\nprint(*[name for name in {suspects!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_client_is_light() -> None:
    suspects = (
        "openvino",
        "openvino_genai",
        "hivemind",
        "torch",
        "transformers",
        "rich",
        "typer",
        "starlette",
        "uvicorn",
    )
    assert loaded_by("import client", *suspects) == set()


def test_the_command_line_is_light_before_a_command_is_chosen() -> None:
    suspects = ("openvino", "openvino_genai", "hivemind", "torch", "numpy", "cryptography", "client", "peer", "export")
    assert loaded_by("import swarm.app.main", *suspects) == set()


@pytest.mark.parametrize(
    "module",
    [
        "client.client",
        "client.cli",
        "client.inspector.cli",
        "swarm.discovery.peer_directory",
        "swarm.discovery.download",
        "swarm.routing.choose",
    ],
)
def test_what_a_client_loads_needs_no_dht(module: str) -> None:
    assert loaded_by(f"import {module}", "hivemind", "torch", "openvino") == set()


MODULES = [module_name(path) for path in SOURCES if path.name != "__main__.py"]


def test_importing_has_no_side_effects() -> None:
    """No log handler, no thread, no child, no changed signal, environment or working directory."""
    code = f"""
import importlib, logging, os, signal, sys, threading
import openvino  # it starts a thread for its own telemetry
def world():
    return (
        [*logging.getLogger().handlers, logging.getLogger().level],
        {{n: l.handlers for n, l in logging.root.manager.loggerDict.items()
          if n.split(".")[0] in {PACKAGES!r} and getattr(l, "handlers", None)}},
        {{s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)}},
        [t.name for t in threading.enumerate()], os.getcwd(), sys.excepthook,
    )
before = world()
for name in {MODULES!r}:
    importlib.import_module(name)
    after = world()
    assert after == before, f"{{name}}: {{before}} became {{after}}"
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_the_page_on_architecture_lists_the_files_that_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("| file | what it holds |", 1)[1].split("\n\n", 1)[0]
    said: set[str] = set()
    for row in table.splitlines()[2:]:
        first, second = row.strip("|").split("|", 1)
        names = re.findall(r"`([\w/]+(?:\.py)?/?)`", first)
        folder = names[0] if names[0].endswith("/") else str(Path(names[0]).parent) + "/"
        if names == [folder]:
            names = re.findall(r"`(\w+\.py)`", second)
        said |= {folder + name.removeprefix(folder) for name in names}
    there = {str(path) for path in SOURCES if path.name not in ("__init__.py", "__main__.py")}
    assert sorted(there - said) == []  # not in the table
    assert sorted(said - there) == []  # not there any more


def test_every_package_and_folder_of_tests_is_listed_or_marked() -> None:
    """A forgotten sub-package is missing from the wheel; a tests/client without __init__ shadows client."""
    project = (ROOT / "pyproject.toml").read_text()
    for path in {path.parent for path in SOURCES}:
        assert f'"{str(path).replace("/", ".")}"' in project
    for test in (ROOT / "tests").rglob("*.py"):
        assert (test.parent / "__init__.py").is_file(), test
