"""``lampejo plan`` as a command: its output, its exit code, its refusals."""

import json

import pytest

from lampejo.cli import USER_MISTAKE, main

QUESTION = ["plan", "Qwen/Qwen3.5-122B-A10B", "--gpu", "b200"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("lampejo.plan.sources.fetch_config", lambda repo, revision: None)


def test_the_question_is_answered_in_words_above_the_tables(capsys):
    """Can one B200 give 1,000 tokens/s on the 122B, and with what?"""
    assert main(QUESTION) == 0
    out, _ = capsys.readouterr()
    first = out.partition("\n\n")[0].replace("\n", " ")
    assert "1,000 tok/s on one device: yes, in fp4." in first and "fp8 fits (126 of 176 GB)" in first
    assert "122.1 billion, 9.77 active per token" in out
    assert "computed and not measured" in first and "inferred" not in out


def test_json_is_one_object(capsys):
    flags = "--precision fp8 --devices 1 --acceptance-length 8,6 --concurrency 4 --context 8192 --json"
    assert main([*QUESTION, *flags.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(way["precision"], way["devices"]) for way in found["ways"]] == [("fp8", 1)]
    assert found["wish"]["acceptance"] == [6, 8] and found["wish"]["concurrency"] == 4
    assert found["wish"]["goal"] is None  # nobody asked for one, with several requests


def test_what_does_not_fit_makes_the_exit_code_one(capsys):
    assert main(["plan", "Qwen/Qwen3.5-122B-A10B", "--gpu", "RTX-4090", "--devices", "1"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--gpu", "tpu"], ["--gpu tpu", "Known: a100"]),
        (["--gpu", "h100", "--precision", "q4"], ["--precision q4", "bf16, fp8, fp4"]),
        (["--cpu", "--precision", "fp8"], ["--precision fp8", "q8, q4"]),
        (["--cpu", "--devices", "2"], ["--devices"]),
        (["--gpu", "h100", "--cpu"], ["not allowed"]),
        (["--gpu", "h100", "--acceptance-length", "many"], ["--acceptance-length", "4,6.5"]),
        (["--gpu", "h100", "--acceptance-length", "17"], ["17", "block of 16", "Give 1 to 16"]),
        (["--gpu", "h100", "--acceptance-length", "0.5"], ["at least 1"]),
        (["--gpu", "h100", "--acceptance-length", "4", "--drafter", "none"], ["none takes part"]),
        (["--gpu", "h100", "--context", "1000000"], ["does not fit this model", "262144"]),
        (["--gpu", "h100", "--concurrency", "0"], ["--concurrency"]),
        (["--gpu", "h100", "--goal", "0"], ["--goal"]),
        (["--gpu", "h100", "--drafter", "nonsense"], ["Unknown drafter"]),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, flags, parts):
    assert main(["plan", "Qwen/Qwen3.5-122B-A10B", *flags]) == USER_MISTAKE
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert [part for part in parts if part not in err] == []
