"""Rules of the house that a reader can rely on, checked on the sources."""

import ast
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ptq.methods import METHODS
from ptq.models.families import FAMILIES
from ptq.weights.formats import FORMATS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ptq", *METHODS)
SOURCES = sorted(path for folder in (*PACKAGES, "scripts") for path in (ROOT / folder).rglob("*.py"))
PACKAGED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
MAX_LINES, MAX_SCRIPT_LINES, MAX_FUNCTION_LINES = 300, 400, 60


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports are absolute"
            yield node.module or ""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", PACKAGED, ids=name_of)
def test_imports_point_from_methods_to_ptq(path: Path) -> None:
    """ptq imports no method, and no method another one."""
    package = path.relative_to(ROOT).parts[0]
    found = {module.partition(".")[0] for module in imports(path)}
    assert not found & (set(METHODS) - {package})
    assert "scripts" not in found and "tests" not in found


PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDERS = re.findall(r"^\| `ptq/(\w+)/` ", PAGE, re.MULTILINE)
"""Of ptq/, in the order of the page: each stands on those before it."""
KERNELS = re.findall(r"`(\w+)/`", PAGE.partition("| `csrc/` |")[2].partition("\n\n")[0])
"""Folders of csrc/, in the order of the page."""
FOR_ALL = {"errors", "recipe", "engine", "startup", "methods", "demo"}
"""What every folder may import, and what imports no folder."""


def test_every_folder_has_a_place():
    assert {*FOLDERS, "demo"} == {path.parent.name for path in (ROOT / "ptq").glob("*/__init__.py")}


def names_from(path: Path, package: str) -> Iterator[str]:
    """What a file imports from a package, by name."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            yield from (alias.name for alias in node.names)


def parts_of_ptq(path: Path) -> Iterator[str]:
    """What a file imports of ptq, wherever in the file, and for types alone, too: folders, and files beside them."""
    yield from names_from(path, "ptq")
    for module in imports(path):
        if module.startswith("ptq."):
            yield module.split(".")[1]


@pytest.mark.parametrize("path", [path for path in SOURCES if name_of(path).startswith("ptq/")], ids=name_of)
def test_a_folder_imports_only_those_before_it(path: Path) -> None:
    room = path.relative_to(ROOT / "ptq").parts[0].removesuffix(".py")
    if room in ("__init__", "__main__", "cli", "cli_checkpoints", "cli_models", "run"):
        return  # the package and its commands: they may import everything
    before = {*FOLDERS[: FOLDERS.index(room) + 1]} if room in FOLDERS else set()
    assert {*parts_of_ptq(path)} <= before | FOR_ALL


FAST = re.findall(r"^\| `ptq/fast/(\w+)/` ", PAGE, re.MULTILINE)
"""Folders of ptq/fast/, in the order of the page."""


def test_every_folder_of_replacements_has_a_place() -> None:
    assert sorted(FAST) == sorted(path.parent.name for path in (ROOT / "ptq/fast").glob("*/__init__.py"))


@pytest.mark.parametrize("path", sorted((ROOT / "ptq/fast").glob("*/*.py")), ids=name_of)
def test_a_folder_of_replacements_imports_only_those_before_it(path: Path) -> None:
    imported = {*imports(path)} | {f"ptq.fast.{name}" for name in names_from(path, "ptq.fast")}
    found = {module.split(".")[2] for module in imported if module.startswith("ptq.fast.")}
    assert found <= {*FAST[: FAST.index(path.parent.name) + 1], "trials", "watched"}


def test_every_folder_of_kernels_has_a_place() -> None:
    assert sorted(KERNELS) == sorted(path.name for path in (ROOT / "csrc").iterdir())


@pytest.mark.parametrize("folder", KERNELS)
def test_a_folder_of_kernels_includes_only_those_before_it(folder: str) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "csrc" / folder).iterdir())
    included = {*re.findall(r'^#include "(\w+)/', sources, re.MULTILINE)}
    assert included <= {*KERNELS[: KERNELS.index(folder) + 1]}


def lines_of_any_processor(source: str) -> Iterator[str]:
    """Those outside of `#if defined(__x86_64__)`."""
    inside: list[bool] = []
    for line in source.splitlines():
        directive, _, condition = line.strip().partition(" ")
        if directive.startswith("#if"):
            inside.append("__x86_64__" in condition)
        elif directive.startswith("#el"):
            inside[-1] = "__x86_64__" in condition
        elif directive == "#endif":
            inside.pop()
        elif not any(inside):
            yield line


@pytest.mark.parametrize("path", sorted((ROOT / "csrc").rglob("*.[ch]*")), ids=lambda path: path.name)
def test_only_code_of_x86_names_tables_of_x86(path: Path) -> None:
    """Elsewhere there are none, and a library with an undefined name does not load. `at_level` may name them."""
    lines = lines_of_any_processor(path.read_text(encoding="utf-8"))
    assert not [line for line in lines if re.search(r"return \w*(avx|amx)\w*;", line)]


@pytest.mark.parametrize("path", PACKAGED, ids=name_of)
def test_modules_are_imported_by_name_in_two_places_only(path: Path) -> None:
    """Nothing that a checkpoint says can be imported: the names come from two fixed tables."""
    if name_of(path) in ("ptq/methods.py", "ptq/weights/formats.py"):
        return
    assert not [name for name, _ in calls(path) if name.endswith("import_module") or name == "__import__"]


def test_the_tables_name_packages_of_this_project() -> None:
    assert all(module.partition(".")[0] in PACKAGES for module, _ in FORMATS.values())
    assert all((ROOT / method / "plan.py").is_file() and (ROOT / method / "cli.py").is_file() for method in METHODS)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    limit = MAX_LINES if path in PACKAGED else MAX_SCRIPT_LINES
    assert lines <= limit, f"{lines} lines: find the second noun in it"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_are_named_for_a_noun(path: Path) -> None:
    assert path.stem not in ("utils", "util", "helpers", "helper", "common", "misc")


@pytest.mark.parametrize("path", PACKAGED, ids=name_of)
def test_no_family_is_named_outside_the_table(path: Path) -> None:
    """What depends on the model is a field of its row; `if model_type == ...` needs such a name."""
    if name_of(path).startswith("ptq/models/") and name_of(path).endswith(("families.py", "_rows.py")):
        return
    tree = tree_of(path)
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text for text in found if text in FAMILIES]


UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"torch.load", "np.load", "numpy.load", "eval", "exec", "pd.read_pickle"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_unpickled_and_no_code_of_a_checkpoint_runs(path: Path) -> None:
    assert not {module.partition(".")[0] for module in imports(path)} & UNSAFE_MODULES
    for name, call in calls(path):
        assert name not in UNSAFE_CALLS, f"line {call.lineno}: {name}"
        for keyword in call.keywords:
            trusted = keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
            assert not trusted, f"line {call.lineno}: code of a checkpoint is never executed"


NAMED = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)")


@pytest.mark.parametrize("path", PACKAGED, ids=name_of)
def test_what_a_text_points_to_exists(path: Path) -> None:
    """Modules, and what is in them, that docstrings and comments name in full."""
    for name in NAMED.findall(path.read_text(encoding="utf-8")):
        if not name.endswith(".py"):  # a file: see tests/test_docs.py
            assert pydoc.locate(name) is not None, f"{name_of(path)}: there is no {name}"
