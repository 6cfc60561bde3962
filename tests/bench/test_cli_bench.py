"""``lampejo bench`` as a command: its object, its report, its exit code, its refusals."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

import lampejo.cli_bench
from lampejo.bench.measure import SUITES, Bench
from lampejo.cli import USER_MISTAKE, main
from lampejo.cli_options import ModelOptions
from tiny_bench import TINY_SUITE, config_of, tiny_loaded


@pytest.fixture
def tiny(monkeypatch):
    """The command over a tiny model, without fresh processes; the quick suite's sizes made tiny too."""

    def start(options, results):
        results.start_s, results.peak_rss_mb = [1.0], 100.0

    monkeypatch.setattr(lampejo.cli_bench, "locate", lambda spec: Path("tiny.gguf"))
    monkeypatch.setattr(lampejo.cli_bench, "_start", start)
    monkeypatch.setattr(ModelOptions, "load_parts", lambda self: (tiny_loaded(), config_of()))
    monkeypatch.setitem(SUITES, "quick", TINY_SUITE)


def test_the_last_line_is_one_object_and_the_page_is_written(tiny, capsys, tmp_path):
    """From flags to the report."""
    page = tmp_path / "report.html"
    flags = "--json --categories chat,maths --max-tokens 4 --runs 1 --arms dflash,ngram --synthetic-acceptance 0.8,0.5"
    code = main(["bench", *flags.split(), "--report", str(page)])
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["failed"] == 0
    first = ["machine", "model", "arms", "categories", "concurrency", "verify_cost", "prefill"]
    assert list(found) == [*first, "peak_rss_mb", "start_to_first_token_s", "peers", "failed"]
    assert list(found["arms"]) == ["plain", "dflash", "ngram", "synthetic"]
    assert list(found["categories"]) == ["chat", "maths"]
    assert found["verify_cost"]["1"] == 1.0 and len(found["verify_cost"]) == 17
    assert found["model"]["thinking"] and found["model"]["chat_template"] and found["model"]["ops"]
    assert "answers, greedy" in err
    ElementTree.fromstring(page.read_text("utf-8").partition("\n")[2])


def test_without_json_the_tables_are_the_output(tiny, capsys):
    assert main(["bench", "--categories", "chat", "--arms", "plain", "--max-tokens", "3"]) == 0
    out, _ = capsys.readouterr()
    assert "answers, greedy" in out and "start to first token 1 s, peak memory 100 MB" in out


def test_only_the_sections_asked_for_are_measured(tiny, capsys):
    """A large model is slow: its peers can be measured without the rest, and what was not measured stays empty."""
    assert main(["bench", "--sections", "verify,lengths", "--arms", "plain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verify_cost"] and found["prefill"]
    assert not found["categories"] and not found["concurrency"] and found["peak_rss_mb"] is None


def test_one_failed_request_makes_the_exit_code_one(tiny, capsys, monkeypatch):
    """V3."""
    honest = Bench.answer

    def flaky(self, arm, prompts, where, params):
        if (arm, where) == ("auto", "chat 2"):
            self.fail("chat 2, auto: RuntimeError: out of luck")
            return None
        return honest(self, arm, prompts, where, params)

    monkeypatch.setattr(Bench, "answer", flaky)
    assert main(["bench", "--categories", "chat", "--arms", "auto", "--max-tokens", "3", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"] == 1
    assert "failed: chat 2, auto: RuntimeError: out of luck" in err


def test_a_fresh_process_that_fails_is_a_failure_too(monkeypatch):
    """V3: also where no request was ever made."""
    from lampejo.bench.measure import Results
    from lampejo.bench.startup import StartError
    from lampejo.cli import make_parser

    def broken(*_):
        raise StartError("lampejo generate ended with code 2")

    monkeypatch.setattr(lampejo.cli_bench, "peak_rss_mb", broken)
    results = Results()
    lampejo.cli_bench._start(lampejo.cli_bench.bench_options(make_parser().parse(["bench"])), results)
    assert results.failures == ["a fresh process: lampejo generate ended with code 2"]


def refuse(*_: object) -> None:
    raise AssertionError("work began before the mistake was seen")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--arms plain,eagle", ["--arms", "eagle", "dflash"]),
        ("--categories poems", ["--categories", "poems", "prose"]),
        ("--sections all", ["--sections", "all", "verify"]),
        ("--suite medium", ["--suite", "medium"]),
        ("--max-tokens 1", ["--max-tokens"]),
        ("--runs 0", ["--runs"]),
        ("--synthetic-acceptance 1.5", ["--synthetic-acceptance", "0.8,0.7,0.6"]),
        ("--peer vllm", ["vllm", "llama.cpp"]),
        ("--report /nowhere/at/all.html", ["/nowhere/at"]),
        ("--threads 0", ["--threads"]),
    ],
)
def test_mistakes_are_told_in_one_line_before_any_work(flags, words, monkeypatch, capsys):
    monkeypatch.setattr(lampejo.cli_bench, "locate", refuse)
    assert main(["bench", *flags.split()]) == USER_MISTAKE
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_an_arm_without_its_drafter_is_refused_when_asked_for_and_noted_otherwise(tiny, monkeypatch, capsys):
    """Never a silent fall-back: dflash without a drafter would be plain decoding under another name."""
    loaded = tiny_loaded()
    loaded.runner.drafter = None
    monkeypatch.setattr(ModelOptions, "load_parts", lambda self: (loaded, config_of()))
    assert main(["bench", "--arms", "dflash"]) == USER_MISTAKE
    capsys.readouterr()
    assert main(["bench", "--categories", "chat", "--max-tokens", "3"]) == 0
    assert "no DFlash drafter is loaded" in capsys.readouterr().out
