"""The pages say what is true: commands, flags, names and places in the code resolve (case C8)."""

import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import pytest

import lampejo
from lampejo.cli import make_parser
from lampejo.errors import UserError
from lampejo.weights.aliases import ALIASES
from lampejo.weights.store import _REPO

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("src/lampejo/data/*/README.md")])
ALL_PAGES = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_of(page: Path) -> list[str]:
    """The lines of all code blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def commands_of(page: Path) -> list[list[str]]:
    """Every lampejo command line, in code blocks and in the text."""
    lines = [line.strip().removeprefix("$ ") for line in code_of(page)]
    lines += re.findall(r"`(lampejo [^`]+)`", page.read_text("utf-8"))
    found = []
    for line in lines:
        for part in line.split(" | "):
            if part.startswith(("lampejo ", "python -m lampejo ")) and not re.search(r"COMMAND|\[flags\]", part):
                found.append(shlex.split(part.removeprefix("python -m "), comments=True)[1:])
    return found


def assert_model_resolves(name: str) -> None:
    """An alias, or the form of a repository, a folder or a file: what only a network could tell is not asked."""
    assert name in ALIASES or name.startswith(("./", "/")) or _REPO.fullmatch(name), name


def test_the_printed_help_in_the_docs_is_current():
    """STYLE: docs/cli.md is generated; `make docs` brings it up to date."""
    spec = importlib.util.spec_from_file_location("generate_cli", ROOT / "docs" / "generate_cli.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text("utf-8") == module.make_page(), "run: make docs"


@ALL_PAGES
def test_every_command_line_is_understood(page):
    """C8: commands, flags and model names of the documentation resolve against the parser and the aliases."""
    for argv in commands_of(page):
        if len(argv) == 1 and argv[0] in make_parser().commands:
            continue  # a command named in the text
        try:
            args = make_parser().parse(argv)
        except SystemExit as stop:  # --help, --version
            assert stop.code == 0
            continue
        except UserError as error:
            raise AssertionError(f"{page.name}: {argv}: {error}") from None
        if hasattr(args, "model"):
            assert_model_resolves(args.model)


@ALL_PAGES
def test_every_flag_in_the_text_exists(page):
    """C8: a flag that is named outside a command line is one of ours."""
    known = {flag for command in make_parser().commands.values() for flag in command._option_string_actions}
    flags = re.findall(r"`(--[a-z][a-z-]*)", page.read_text("utf-8"))
    assert {flag for flag in flags if flag not in known} == set()


@ALL_PAGES
def test_every_make_target_exists(page):
    """C8: the two commands of a newcomer."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = re.findall(r"`make (\w+)", page.read_text("utf-8")) + [
        line.split()[1] for line in code_of(page) if re.match(r"make [a-z]", line)
    ]
    assert set(named) <= set(targets)


@ALL_PAGES
def test_python_examples_use_what_exists(page):
    """C8: models and names of the Python examples."""
    code = "\n".join(code_of(page))
    for model in re.findall(r"lampejo\.load\(\"([^\"]+)\"", code):
        assert_model_resolves(model)
    for name in re.findall(r"\blampejo\.(\w+)", code):
        assert hasattr(lampejo, name) or (ROOT / "src" / "lampejo" / name).exists(), name
    known = {*inspect.signature(lampejo.LLM.make_request).parameters, *vars(lampejo.LLM)}
    for method in re.findall(r"\bllm\.(\w+)", code):
        assert method in known


@ALL_PAGES
def test_every_place_in_the_code_exists(page):
    """Fault: a walk along the code that leads to functions which moved away."""
    for file, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", page.read_text("utf-8")):
        source = (ROOT / "src" / "lampejo" / file).read_text("utf-8")
        for part in name.split("."):
            assert re.search(rf"^\s*(async def|def|class) {part}\b", source, re.MULTILINE), f"{file}:{name}"


@ALL_PAGES
def test_every_link_leads_somewhere(page):
    """Fault: a page that was renamed."""
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / link).exists(), link


@ALL_PAGES
def test_every_file_of_a_file_tree_exists(page):
    """Fault: a tree in the pages that the repository has outgrown."""
    folders = [ROOT, *(ROOT / name for name in ("src", "tests", "docs"))]
    names = {path.name for folder in folders for path in folder.glob("*" if folder == ROOT else "**/*")}
    for line in code_of(page):
        if "(planned)" not in line and re.match(r"\s*[\w./]+\.(py|md) ", line):
            assert set(re.findall(r"\b(\w+\.(?:py|md))\b", line)) <= names, line


def test_all_modules_stand_in_the_design():
    """Fault: a new module that no reader is told of."""
    named = set(re.findall(r"\b\w+\.py\b", (ROOT / "docs" / "design.md").read_text("utf-8")))
    modules = [path.name for path in (ROOT / "src" / "lampejo").rglob("*.py") if not path.name.startswith("__")]
    assert [name for name in modules if name not in named] == []


def test_all_cases_that_tests_name_are_told_and_tested():
    """Fault: an id that leads nowhere, or a case that no test is left of."""
    case = re.compile(r"\b(?:[LBTSPMVO][1-9]|C[1-9]0?)\b")
    told = set(re.findall(rf"^\| ({case.pattern}) ", (ROOT / "tests" / "README.md").read_text("utf-8"), re.MULTILINE))
    docstrings = [
        text
        for file in (ROOT / "tests").rglob("test_*.py")
        for text in re.findall(r'"""(.*?)"""', file.read_text("utf-8"), re.DOTALL)
    ]
    assert {name for text in docstrings for name in case.findall(text)} == told
