"""The order of the modules: imports point only downward, and the host's part of the engine knows no device."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "lampejo"

# From the ground up; a module may import those above it in this list, and no others.
ORDER = [
    "errors",
    "config",
    "ngram",
    "states",
    "pages",
    "width",
    "sampling",
    "ops.reference",
    "ops.recurrence",
    "ops.device",
    "ops",
    "ops.place",
    "ops.stored",
    "ops.cpu.library",
    "ops.cpu.arena",
    "ops.cpu",
    "ops.cpu.delta",
    "ops.cpu.fused",
    "ops.cpu.choice",
    "scores",
    "accept",
    "tokenizer",
    "prompt_bound",
    "text",
    "answer",
    "answer_calls",
    "answer_json",
    "answer_xml",
    "answer_parser",
    "chat",
    "guide",
    "grammar_joint",
    "grammar_costs",
    "grammar_trial",
    "grammar",
    "grammar_compiler",
    "request",
    "scheduler",
    "batch",
    "models",
    "models.config",
    "models.hf_config",
    "models.gguf_config",
    "models.drafter_config",
    "models.gguf_drafter_config",
    "models.layers",
    "models.llama",
    "models.experts",
    "models.qwen3",
    "models.qwen3_5",
    "models.targets",
    "models.dflash",
    "cache",
    "packing",
    "runner",
    "speculate",
    "engine",
    "frontend",
    "weights",
    "weights.files",
    "weights.aliases",
    "weights.safetensors",
    "weights.gguf",
    "weights.hub",
    "weights.store",
    "weights.layout",
    "weights.fp8",
    "weights.tensors",
    "weights.checkpoint",
    "weights.drafter_files",
    "weights.speculators",
    "weights.drafters",
    "weights.describe",
    "drafter_setup",
    "loader",
    "api",
    "terminal",
    "web",
    "server",
    "server.errors",
    "server.config",
    "server.http",
    "server.fields",
    "server.counts",
    "server.service",
    "server.respond",
    "server.metrics",
    "server.security",
    "server.linger",
    "server.access_log",
    "server.models_info",
    "server.sampling_fields",
    "server.chat_job",
    "server.openai_chat",
    "server.responses_body",
    "server.responses",
    "server.anthropic_body",
    "server.anthropic",
    "server.openai_completions",
    "server.tokens",
    "server.app",
    "cli_streams",
    "cli_flags",
    "cli_options",
    "cli_serve",
    "cli_inspect",
    "cli_generate",
    "bench",
    "bench.stats",
    "bench.ties",
    "bench.texts",
    "bench.workloads",
    "bench.arms",
    "bench.peer_transformers",
    "bench.peers",
    "bench.measure",
    "bench.startup",
    "bench.report",
    "bench.plots",
    "bench.page",
    "cli_bench",
    "plan",
    "plan.hardware",
    "plan.sizes",
    "plan.roofline",
    "plan.precision",
    "plan.published",
    "plan.sources",
    "plan.calibrate",
    "plan.planner",
    "plan.report",
    "cli_plan",
    "cli_top",
    "chat_session",
    "cli",
    "__main__",
]


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# The root package is none of them: it is there before all others, and imports the public names only on use.
FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py")) if module_name(file)}


def imports_of(name: str) -> set[str]:
    """Every lampejo module that a file imports, wherever in it, and other top-level packages by their name."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("lampejo.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{name} imports from further up"
            base = node.module or ""
            if node.level:
                base = f"lampejo.{package}.{base}".rstrip(".")
            inner = base.removeprefix("lampejo").removeprefix(".")
            if base.partition(".")[0] != "lampejo":
                found.add(base.partition(".")[0])
                continue
            for alias in node.names:
                member = f"{inner}.{alias.name}".removeprefix(".")
                found |= {part for part in (inner, member) if part in FILES}
    return found


def test_every_module_has_its_place():
    """Fault: a new module that nobody placed, or a place left over."""
    assert sorted(ORDER) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_imports_point_only_downward(name):
    """Fault: a lower layer that knows an upper one, and soon a cycle."""
    below = set(ORDER[: ORDER.index(name)])
    assert {other for other in imports_of(name) if other in FILES} <= below


@pytest.mark.parametrize("name", ["scheduler", "pages", "states", "ngram", "width"])
def test_the_host_part_of_the_engine_does_not_import_torch(name):
    """Design principle 8: host code is pure Python."""
    assert "torch" not in imports_of(name)


def test_devices_are_named_only_behind_the_operations():
    """Design principle 8: a kind of device is known to ops/ and bench/ alone; a flag's help tells names."""
    allowed = re.compile(r"(ops|bench)\.|(ops|bench|cli_flags)$")
    named = [name for name, file in FILES.items() if re.search("cuda|triton", file.read_text("utf-8"))]
    assert [name for name in named if not allowed.match(name)] == []


def test_no_module_is_longer_than_a_sitting():
    """Fault: files that grow until nobody reads them. One of more than 400 lines wants its reason here."""
    assert {name for name, file in FILES.items() if len(file.read_text("utf-8").splitlines()) > 400} == set()
