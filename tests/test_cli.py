"""The command line, mostly in process: one loaded model serves all tests here."""

import errno
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from lampejo import LLM, SamplingParams, StopParams, UserError
from lampejo.chat_session import ChatSession
from lampejo.cli import INTERRUPTED, USER_MISTAKE, main, make_parser
from lampejo.cli_options import ModelOptions
from lampejo.loader import Loaded, load_model, without_drafts
from lampejo.ops.cpu import instruction_set
from lampejo.runner import Runner
from lampejo.scores import Scores
from lampejo.terminal import printable, side_by_side, wants_color

Run = Callable[..., tuple[int, str, str]]
HAIKU = "Write a haiku about the sea"


@pytest.fixture(scope="session")
def parts() -> Callable[..., tuple[Loaded, object]]:
    """``load_model`` that reads the default model's weights once; its engines live one after the other."""
    loaded_once: dict[str, Loaded] = {}

    def load_once(model, drafter, config, threads, target_layer_ids):
        if (model, drafter, threads, target_layer_ids) != ("smollm2", "auto", None, None) or config.width:
            return load_model(model, drafter, config, threads, target_layer_ids)
        if "auto" not in loaded_once:
            loaded_once["auto"] = load_model(model, drafter, replace(config, max_context=None), None, None)[0]
        loaded = loaded_once["auto"]
        resolved = config.resolve(loaded.info["max_context"])
        return (without_drafts(loaded) if config.width == 0 else loaded), resolved

    return load_once


@pytest.fixture
def run(parts, monkeypatch, capsys) -> Run:
    """Runs a command line: exit code, standard output, standard error."""
    monkeypatch.setattr("lampejo.api.load_model", parts)
    monkeypatch.setattr("lampejo.cli_options.load_model", parts)

    def run_main(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out, err = capsys.readouterr()
        # Where the kernels were not built, every load says so; that line has a test of its own.
        return code, out, "".join(line for line in err.splitlines(True) if "several times slower" not in line)

    return run_main


def refuse_to_load(*_: object) -> None:
    raise AssertionError("a model was loaded before the mistake was seen")


def assert_one_line(code: int, out: str, err: str, *words: str) -> None:
    assert code == USER_MISTAKE and out == ""
    assert err.startswith("lampejo: ") and err.count("\n") == 1
    for word in words:
        assert word in err


# Mistakes ------------------------------------------------------------------------------------------------------------

EARLY = {
    "no command": ([], ["COMMAND", "--help"]),
    "unknown command": (["generat", "x"], ["generat", "generate"]),
    "flag before the command": (["--model", "x"], ["--model", "before the command"]),
    "unknown flag": (["generate", "--temprature", "1", "x"], ["--temprature", "Did you mean --temperature?"]),
    "a flag like no other": (["generate", "--bogus", "x"], ["--bogus", "See 'lampejo generate --help'"]),
    "abbreviated flag": (["generate", "--temp", "1", "x"], ["--temp"]),
    "two prompts": (["generate", "write", "poetry"], ["poetry", "quotes"]),
    "no prompt": (["generate"], ["PROMPT"]),
    "empty prompt": (["generate", ""], ["empty"]),
    "blank prompt": (["generate", " \n"], ["empty"]),
    "empty raw prompt": (["generate", "--raw", ""], ["empty"]),
    "lone surrogate": (["generate", "a\udcffb"], ["UTF-8"]),
    "NaN": (["generate", "--temperature", "nan", "x"], ["temperature", "nan"]),
    "infinity": (["generate", "--repetition-penalty", "inf", "x"], ["repetition_penalty", "inf"]),
    "negative temperature": (["generate", "--temperature", "-1", "x"], ["temperature", "at least 0"]),
    "negative max_tokens": (["generate", "--max-tokens", "-5", "x"], ["max_tokens"]),
    "no tokens": (["generate", "--max-tokens", "0", "x"], ["max_tokens"]),
    "min above max": (["generate", "--min-tokens", "9", "--max-tokens", "8", "x"], ["min_tokens", "max_tokens"]),
    "top_p of zero": (["generate", "--top-p", "0", "x"], ["top_p", "above 0"]),
    "no number": (["generate", "--top-k", "many", "x"], ["--top-k", "many"]),
    "logit bias without value": (["generate", "--logit-bias", "5", "x"], ["--logit-bias", "198=-5"]),
    "no such schema": (
        ["generate", "--json-schema", "/nowhere.json", "x"],
        ["--json-schema /nowhere.json cannot be read: No such file"],
    ),
    "logit bias too large": (["generate", "--logit-bias", "5=101", "x"], ["logit_bias", "100"]),
    "empty stop string": (["generate", "--stop", "", "x"], ["stop"]),
    "stop string that is no UTF-8": (["generate", "--stop", "a\udcff", "x"], ["stop", "UTF-8"]),
    "seed of 65 bits": (["generate", "--seed", str(2**64), "x"], ["seed", "at most 18446744073709551615"]),
    "negative stop id": (["generate", "--stop-token-id", "-1", "x"], ["stop_token_ids"]),
    "too many logprobs": (["generate", "--json", "--logprobs", "21", "x"], ["logprobs", "20"]),
    "logprobs without json": (["generate", "--logprobs", "1", "x"], ["--logprobs", "--json"]),
    "negative width": (["generate", "--width", "-1", "x"], ["--width"]),
    "width without drafter": (["generate", "--width", "4", "--drafter", "none", "x"], ["--width", "--drafter none"]),
    "packing for the reference": (["generate", "--ops", "reference", "--quantize", "q4", "x"], ["q4", "reference"]),
    "no threads": (["generate", "--threads", "0", "x"], ["--threads"]),
    "no context": (["generate", "--context", "1", "x"], ["--context"]),
    "taps that are no numbers": (["generate", "--target-layer-ids", "1,b", "x"], ["--target-layer-ids", "1,9,17"]),
    "taps for nobody": (["generate", "--target-layer-ids", "1", "--drafter", "ngram", "x"], ["--target-layer-ids"]),
    "raw with system": (["generate", "--raw", "--system", "y", "x"], ["--raw", "--system"]),
    "drafts in JSON": (["generate", "--json", "--show-drafts", "x"], ["--show-drafts", "--json"]),
    "nothing to compare": (["generate", "--compare", "--drafter", "none", "x"], ["--compare"]),
    "wrong colour": (["generate", "--color", "red", "x"], ["--color", "red"]),
    "chat with a prompt": (["chat", "hello"], ["hello"]),
    "pull of nothing": (["pull"], ["MODEL"]),
}


@pytest.mark.parametrize("name", EARLY)
def test_mistakes_are_told_in_one_line_before_any_model_is_loaded(name, run, monkeypatch):
    """O5 of the command line: a wrong flag or value is named, with a remedy, exit code 2, no traceback, no work."""
    monkeypatch.setattr("lampejo.api.load_model", refuse_to_load)
    monkeypatch.setattr("lampejo.cli_options.load_model", refuse_to_load)
    argv, words = EARLY[name]
    assert_one_line(*run(*argv), *words)


LATE = {
    "unknown model": (["generate", "--model", "nonesuch", "x"], ["'nonesuch'", "smollm2", "org/name", ".gguf"]),
    "unknown model to pull": (["pull", "nonesuch"], ["'nonesuch'", "smollm2"]),
    "missing file to inspect": (["inspect", "./nonesuch.gguf"], ["nonesuch.gguf", "does not exist"]),
    "unknown drafter": (["generate", "--drafter", "nonesuch", "x"], ["drafter 'nonesuch'", "ngram", "org/name"]),
    "context larger than the model's": (["generate", "--context", "9000", "x"], ["9000", "8192"]),
    "more drafts than anybody offers": (["generate", "--width", "100", "x"], ["width is 100", "15 drafts"]),
    "prompt over the context": (["generate", "--context", "40", "word " * 50], ["context of 40"]),
    "token id outside the vocabulary": (["generate", "--logit-bias", "49152=1", "x"], ["49152"]),
}


@pytest.mark.parametrize("name", LATE)
def test_what_only_the_model_can_tell_is_one_line_too(name, run):
    """B5 and the models' own limits: the message names what was given and what is allowed."""
    argv, words = LATE[name]
    assert_one_line(*run(*argv), *words)


def test_a_prompt_that_is_no_utf8_is_refused(run, monkeypatch):
    """Fault: a traceback for a file in another encoding."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert_one_line(*run("generate", "-"), "UTF-8")


def test_every_field_of_a_request_has_its_flag():
    """Fault: a parameter of the Python interface that the command line forgot."""
    flags = make_parser().commands["generate"]._option_string_actions
    names = {f.name for part in (SamplingParams, StopParams) for f in fields(part)} - {"stop_token_ids"}
    assert {f"--{name.replace('_', '-')}" for name in names} | {"--stop-token-id"} <= set(flags)


def test_help_needs_no_torch():
    """Fault: three seconds of imports before a word of help."""
    code = "import sys, lampejo.cli as c\ntry: c.main(['chat', '--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "examples:" in done.stdout, done.stderr


# generate ------------------------------------------------------------------------------------------------------------


def test_json_with_drafts_equals_json_without(run):
    """Issue "Done when": equal ids with the real model, and drafts were verified (V2). Loads twice, as users do."""
    code, out, err = run("generate", HAIKU, "--json", "--max-tokens", "48")
    drafted = json.loads(out)
    assert (code, err) == (0, "")
    plain = json.loads(run("generate", HAIKU, "--json", "--max-tokens", "48", "--drafter", "none")[1])
    for key in ("ids", "text", "finish_reason"):
        assert drafted[key] == plain[key]
    assert drafted["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert plain["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert plain["mode"]["drafters"] == [] and drafted["mode"]["drafters"] == ["ngram", "dflash"]


def test_json_is_one_object_with_everything_about_the_answer(run):
    """V2, B7: statistics in the named shape; as many ids as usage and log probabilities tell."""
    code, out, _ = run("generate", HAIKU, "--json", "--max-tokens", "6", "--logprobs", "2")
    answer = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert {"text", "ids", "finish_reason", "usage", "timings", "metrics", "model", "drafter", "mode"} <= answer.keys()
    assert {"load_s", "first_token_s", "tok_per_s"} <= answer["timings"].keys()
    assert set(answer["metrics"]["speculative_decoding"]) == {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "policy",
        "lossless",
        "num_inexact_tokens",
    }
    assert len(answer["ids"]) == answer["usage"]["completion_tokens"] == len(answer["logprobs"]) == 6
    for token_id, entry in zip(answer["ids"], answer["logprobs"], strict=True):
        assert entry["id"] == token_id and len(entry["top"]) == 2
    assert "".join(entry["token"] for entry in answer["logprobs"]) == answer["text"]


def test_the_stream_prints_the_text_and_the_statistics_go_elsewhere(run, monkeypatch):
    """T1 of the command line: what is streamed is the answer and no more; the effective mode is told beside it."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(HAIKU.encode())))
    code, out, err = run("generate", "-", "--max-tokens", "12")
    answer = json.loads(run("generate", HAIKU, "--max-tokens", "12", "--json")[1])
    assert (code, out) == (0, answer["text"] + "\n")
    assert "12 tokens (length)" in err and "tok/s" in err and "drafts by ngram + smollm2-135m-dflash-proto" in err


def test_raw_and_system_shape_the_prompt(run):
    """Fault: plain text put through the template, or a system message lost."""

    def num_prompt_tokens(*argv: str) -> int:
        return json.loads(run("generate", "--json", "--max-tokens", "1", *argv)[1])["usage"]["prompt_tokens"]

    raw, chat = num_prompt_tokens("--raw", "one two"), num_prompt_tokens("one two")
    assert raw == 2 and chat > 20
    assert num_prompt_tokens("--system", "a b c d e f g h i j k l m n o p q r s t", "one two") != chat


def test_sampling_flags_reach_the_engine(run):
    """L3: the same seed gives the same answer, another seed another; a stop string ends the text before itself."""

    def answer(*argv: str) -> dict:
        return json.loads(run("generate", HAIKU, "--json", "--max-tokens", "16", *argv)[1])

    hot = ["--temperature", "1.0", "--top-p", "0.95", "--seed"]
    assert answer(*hot, "7")["ids"] == answer(*hot, "7", "--width", "0")["ids"] != answer(*hot, "8")["ids"]
    first = answer()["text"].split()[0]
    assert answer("--stop", first)["text"].strip() == "" and answer("--stop", first)["finish_reason"] == "stop"


@pytest.mark.parametrize(("built", "reason"), [(False, "not built; reinstall"), (True, "processor")])
def test_falling_back_to_the_reference_operations_is_said(built, reason, monkeypatch, capsys):
    """Fault: without the kernels everything is several times slower and nobody is told why."""
    monkeypatch.setattr("lampejo.loader.LIBRARY", object() if built else None)
    monkeypatch.setattr("lampejo.loader.instruction_set", lambda: None)
    assert main(["generate", "--raw", "--max-tokens", "2", "--drafter", "none", "--context", "64", "one two"]) == 0
    said, statistics = capsys.readouterr().err.splitlines()
    assert said.startswith("lampejo: the CPU kernels") and "several times slower" in said
    assert all(words in said for words in reason.split("; "))
    assert statistics.endswith("plain decoding, reference operations")


def test_an_answer_by_a_schema_is_json_of_that_form(run, tmp_path):
    """S1: and another schema, which cannot be enforced, is told in a line."""
    file = tmp_path / "schema.json"
    properties = {"city": {"enum": ["Lisbon", "Porto"]}, "big": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["city", "big"], "additionalProperties": False}
    file.write_text(json.dumps(schema), "utf-8")
    code, out, _ = run("generate", "A city in Portugal", "--json-schema", str(file))
    assert code == 0
    answer = json.loads(out)
    assert answer["city"] in ("Lisbon", "Porto")
    assert answer["big"] in (True, False)
    file.write_text('{"type": "array", "uniqueItems": true}', "utf-8")
    assert_one_line(*run("generate", "x", "--json-schema", str(file)), "--json-schema", "uniqueItems")


@pytest.mark.parametrize("flag", ["--raw", "--json", "--compare"])
def test_a_damaged_model_is_told_in_one_line(run, monkeypatch, flag):
    """Fault: empty text and exit code 0 from weights that are no numbers, or a traceback."""
    verify = Runner.verify

    def damaged(self, batch):
        out = verify(self, batch)
        return replace(out, scores=Scores(out.logits * float("nan")))

    monkeypatch.setattr(Runner, "verify", damaged)
    assert_one_line(*run("generate", "--max-tokens", "4", flag, "one two"), "logits are not numbers", "again")


@pytest.mark.parametrize("color", ["always", "never"])
def test_show_drafts_paints_every_token_and_changes_none(run, color):
    """Fault: text lost, doubled or reordered between the colours; colours where none were wanted."""
    argv = ["generate", "Count from one to twenty", "--max-tokens", "24", "--width", "6"]  # drafts, whatever they cost
    text = json.loads(run(*argv, "--json")[1])["text"]
    code, out, err = run(*argv, "--show-drafts", "--color", color)
    legend, _, painted = out.partition("\n")
    marks = ["\x1b[32m", "\x1b[36m", "\x1b[0m"] if color == "always" else list("[]{}")
    assert code == 0 and all(mark in legend for mark in marks) and any(mark in painted for mark in marks)
    assert ("\x1b" in out) == (color == "always")
    for mark in marks:
        painted = painted.replace(mark, "")
    assert painted == text + "\n"
    assert "DFlash" in legend and "tokens by origin: DFlash" in err


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    """Fault: escape codes in files, or in spite of NO_COLOR."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color("auto", Terminal()) and not wants_color("auto", io.StringIO())
    assert wants_color("always", io.StringIO()) and not wants_color("never", Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color("auto", Terminal())


def test_a_model_cannot_steer_the_terminal():
    """Fault: escape sequences in an answer move the cursor or worse."""
    assert printable("a\x1b[2Jb\x07\x9b\r\n\té😀") == "a\ufffd[2Jb\ufffd\ufffd\ufffd\n\té😀"


def test_columns_keep_their_width():
    """Fault: a long word or an empty line breaks the table."""
    lines = side_by_side("one\n\n" + "x" * 90, "two", 63).splitlines()
    assert [line.index("|") for line in lines if "|" in line] == [31] * len(lines) and max(map(len, lines)) <= 63


# compare -------------------------------------------------------------------------------------------------------------


def test_compare_shows_both_answers_and_that_they_are_identical(run):
    """The main job: one prompt plain and with drafts, side by side, and the proof below."""
    code, out, _ = run("generate", "--compare", "--width", "3", "--max-tokens", "24", HAIKU)
    assert code == 0 and out.splitlines()[-1] == "identical: yes"
    effective = ("int8", "q4: 210, q8: 1; keys and values float16, 24,576 bytes per token")
    if instruction_set() is None:
        effective = ("float32", "fp32; keys and values float32, 49,152 bytes per token")
    assert all(words in out.splitlines()[1] for words in effective)
    assert "times plain" in out and "acceptance length" in out and out.count("tok/s") == 2


def test_compare_in_json_holds_at_any_temperature(run):
    """L3: without a seed both answers still share one."""
    code, out, _ = run("generate", "--compare", "--json", "--max-tokens", "16", "--temperature", "0.9", HAIKU)
    result = json.loads(out)
    assert code == 0 and result["identical"] and result["plain"]["ids"] == result["drafted"]["ids"]
    assert result["plain"]["mode"]["drafters"] == [] != result["drafted"]["mode"]["drafters"]


def test_compare_fails_when_the_answers_differ(run, monkeypatch):
    """Fault: a comparison that cannot fail."""
    generate = LLM.generate

    def falsified(self, prompt, **params):
        completion = generate(self, prompt, **params)
        return replace(completion, ids=[0, *completion.ids[1:]]) if self.info["drafters"] else completion

    monkeypatch.setattr(LLM, "generate", falsified)
    code, out, _ = run("generate", "--compare", "--max-tokens", "4", HAIKU)
    assert code == 1 and out.splitlines()[-1] == "identical: no"
    load = ModelOptions.load_parts

    def on_a_gpu(self):
        loaded, config = load(self)
        return replace(loaded, info={**loaded.info, "ops": "device"}), config

    monkeypatch.setattr(ModelOptions, "load_parts", on_a_gpu)
    code, out, _ = run("generate", "--compare", "--max-tokens", "4", HAIKU)
    assert code == 1 and out.splitlines()[-1] == "identical: no (at near-ties a GPU may choose either token)"


# pull and inspect ----------------------------------------------------------------------------------------------------


def test_pull_prints_where_the_model_lies(run):
    """C8: the default alias resolves; a second pull fetches nothing."""
    code, out, _ = run("pull", "smollm2")
    assert code == 0 and out.strip().endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_inspect_tells_what_a_model_is(run):
    """Fault: sizes, template or drafters missing from the description; another size of the cache than a run has."""
    code, table, _ = run("inspect", "smollm2")
    known = json.loads(run("inspect", "--json", "smollm2")[1])
    assert code == 0 and "134,515,008" in table and "the drafter's context included" in table
    mode = json.loads(run("generate", "--json", "--max-tokens", "1", "x")[1])["mode"]
    assert f"{mode['kv_bytes_per_token']:,} bytes per token in {mode['kv_dtype']}" in table
    assert [known[key] for key in ("kv_bytes_per_token", "kv_dtype")] == [mode["kv_bytes_per_token"], mode["kv_dtype"]]
    assert known["num_parameters"] == 134_515_008
    assert known["config"]["num_layers"] == 30 and known["eos_ids"] == [2] and known["num_bytes"] == 98_362_432
    assert known["matching_drafters"] == ["smollm2-135m-dflash-proto"] and "im_start" in known["chat_template"]


# chat ----------------------------------------------------------------------------------------------------------------


def say(monkeypatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_chat_through_a_pipe_remembers_saves_and_forgets(run, monkeypatch, tmp_path):
    """Fault: history lost between turns, commands sent to the model, notes among the answers."""
    file = tmp_path / "chat.json"
    save = f"/save {file}"
    say(
        monkeypatch,
        "My name is Ana.",
        "",
        "//and yours?",
        "/stats",
        save,
        save,
        "/nonsense",
        "/clear",
        "/help",
        "/quit",
    )
    code, out, err = run("chat", "--max-tokens", "8", "--system", "Be brief.")
    saved = json.loads(file.read_text("utf-8"))["messages"]
    assert code == 0
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert [saved[0]["content"], saved[1]["content"], saved[3]["content"]] == [
        "Be brief.",
        "My name is Ana.",
        "/and yours?",
    ]
    assert out == f"{saved[2]['content']}\n{saved[4]['content']}\n"
    for note in ("2 finished answers, 16 tokens", "acceptance length", "already", "/nonsense", "forgotten", "//text"):
        assert note in err


def test_a_chat_ends_with_its_input_and_survives_mistakes(run, monkeypatch, tmp_path):
    """Fault: one refused message ends the conversation, or stays in it."""
    say(monkeypatch, "word " * 90, "/save", f"/save {tmp_path}", f"/save {tmp_path}/none/chat.json", "/system", "Hi")
    code, out, err = run("chat", "--max-tokens", "2", "--context", "96")
    assert code == 0 and len(out.splitlines()) == 1
    assert err.count("lampejo: ") == 4 and "leaves no room" in err and "There is no system message now." in err


def test_a_long_chat_forgets_its_oldest_turns_and_says_so(run, monkeypatch, tmp_path):
    """Fault: the conversation grows over the context and every further message is refused."""
    file = tmp_path / "chat.json"
    say(monkeypatch, *["Tell me about the sea and the wind and the sand"] * 5, f"/save {file}")
    code, _, err = run("chat", "--max-tokens", "12", "--context", "128", "--system", "x")
    messages = json.loads(file.read_text("utf-8"))["messages"]
    assert code == 0 and "were dropped to fit the context of 128 tokens" in err
    assert [m["role"] for m in messages[:3]] == ["system", "user", "assistant"] and len(messages) < 11


def test_a_message_over_the_context_costs_nothing_but_itself(run, monkeypatch, tmp_path):
    """Fault: one message that is too long wiped the whole conversation, and was refused after that."""
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    say(monkeypatch, "My name is Ana.", f"/save {files[0]}", "word " * 200, f"/save {files[1]}", "Hi")
    code, out, err = run("chat", "--max-tokens", "2", "--context", "128")
    before, after = (json.loads(file.read_text("utf-8")) for file in files)
    assert code == 0 and before == after and len(before["messages"]) == 2
    assert err.count("leaves no room in the context of 128") == 1 and "dropped" not in err
    assert len(out.splitlines()) == 2


class InterruptedModel:
    """Stands in for an ``LLM``: Ctrl-C comes in the middle of its first answer."""

    chat_template, max_context = "yes", 1000
    info: dict = {"model": "tiny", "drafters": []}  # noqa: RUF012

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def encode(self, messages):
        return [0] * len(messages)

    def stream(self, messages, **params):
        self.asked.append([message["content"] for message in messages])
        yield type("Chunk", (), {"text": "Once upon", "finish_reason": None})
        raise KeyboardInterrupt


def test_a_save_that_fails_can_be_tried_again(tmp_path, monkeypatch):
    """Fault: a full disk left an empty file, and the next try said that it exists already."""
    session = ChatSession(InterruptedModel(), {}, None)  # type: ignore[arg-type]
    file = tmp_path / "chat.json"

    def full_disk(content: object, stream: io.TextIOBase, **_: object) -> None:
        stream.write("half")
        stream.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("lampejo.chat_session.json.dump", full_disk)
        with pytest.raises(UserError, match=r"chat\.json cannot be written.*No space left"):
            session.save(str(file))
    assert not file.exists()
    session.save(str(file))
    assert json.loads(file.read_text("utf-8"))["messages"] == []
    with pytest.raises(UserError, match="exists already"):
        session.save(str(file))
    assert json.loads(file.read_text("utf-8"))["messages"] == []


def test_an_interrupted_answer_stays_in_the_conversation(capsys):
    """Fault: Ctrl-C loses what was said, or leaves a question without an answer in the history."""
    model = InterruptedModel()
    session = ChatSession(model, {}, None)  # type: ignore[arg-type]
    lines = iter(["Tell me a story\n", "Go on\n"])
    assert session.run(lambda: next(lines, "")) == 0
    assert model.asked == [["Tell me a story"], ["Tell me a story", "Once upon", "Go on"]]
    assert capsys.readouterr().err.count("(stopped)") == 2


def test_ctrl_c_at_the_prompt_ends_the_chat(run, monkeypatch):
    """Fault: a traceback, or a chat that cannot be left."""

    class Keyboard(io.StringIO):
        def readline(self, *_: object) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Keyboard())
    code, _, err = run("chat")
    assert code == INTERRUPTED and "Traceback" not in err


def test_a_model_without_template_does_not_chat(run, parts, monkeypatch):
    """Fault: messages silently glued together, a system message silently dropped."""

    def without_template(*args):
        loaded, config = parts(*args)
        return replace(without_drafts(loaded), chat_template=None), config

    monkeypatch.setattr("lampejo.cli_options.load_model", without_template)
    assert_one_line(*run("chat"), "no chat template", "--raw")
    assert_one_line(*run("generate", "--system", "x", "y"), "no chat template")
    assert json.loads(run("generate", "--json", "--max-tokens", "1", "one two")[1])["usage"]["prompt_tokens"] == 2
