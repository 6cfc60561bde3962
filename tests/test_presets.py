"""Settings for uses: what flags and presets come to, and what a shorter block and a nearer horizon do to a drafter."""

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lampejo import cli_options
from lampejo.api import LLM
from lampejo.cli_flags import PRESETS, TYPICAL_THRESHOLD, add_model_flags, given_model_flags
from lampejo.cli_options import ModelOptions, model_options
from lampejo.config import Drafting, EngineConfig
from lampejo.drafter_setup import DrafterChoice
from lampejo.errors import UserError
from lampejo.loader import load_model, with_thinking
from lampejo.models.config import DrafterConfig
from lampejo.ops.cpu import instruction_set
from lampejo.request import StopParams
from scripted import CHAT
from tiny import TINY_DRAFTER, make_drafter, make_engine, make_request, make_target, prompt_of, run
from tiny_bench import config_of, tiny_loaded

PAGE = Path(__file__).parent.parent / "docs" / "policies.md"
SWITCH = CHAT + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def options(*argv: str) -> ModelOptions:
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    return model_options(parser.parse_args(argv))


def test_without_flags_everything_is_left_to_the_engine_and_lossless():
    assert options() == ModelOptions()
    assert options().engine == EngineConfig() and options().engine.drafting == Drafting()
    assert options().engine.drafting.policy == "lossless"


def test_another_process_is_given_all_flags_of_the_model():
    """Fault: a new flag that the process which `bench` weighs is not told of."""
    every = (
        "--model m --drafter ngram --target-layer-ids 1,2 --context 64 --thinking off --ops cpu --quantize q4"
        " --device cpu --dtype fp32 --threads 3 --preset batch --width 2 --block 3 --draft-window 9 --max-rows 5"
        " --policy typical --typical-threshold 0.5"
    )
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    args = parser.parse_args(every.split())
    assert given_model_flags(args) == tuple(every.split())
    assert parser.parse_args(given_model_flags(parser.parse_args(["--width", "0"]))).width == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_flags(name):
    """What --help prints is what is set; all presets are lossless."""
    flags = [part for flag, value in PRESETS[name].items() for part in (f"--{flag.replace('_', '-')}", str(value))]
    by_preset, by_flags = options("--preset", name), options(*flags)
    assert by_preset.engine == by_flags.engine != EngineConfig() or by_preset.thinking is not None
    assert by_preset.thinking == by_flags.thinking
    assert by_preset.engine.drafting.policy == "lossless"


@pytest.mark.parametrize("name", PRESETS)
def test_a_flag_goes_before_the_preset(name):
    given = {"thinking": "on", "block": "3", "draft_window": "99", "max_rows": "5", "width": "2"}
    flags = [part for flag, value in given.items() for part in (f"--{flag.replace('_', '-')}", value)]
    assert options("--preset", name, *flags) == options(*flags)


def test_the_page_tells_what_each_preset_sets():
    """Fault: a page that was true once."""
    page = PAGE.read_text("utf-8")
    for name, flags in PRESETS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        for flag, value in flags.items():
            assert f"`--{flag.replace('_', '-')} {value}`" in row, name


def test_the_policy_and_its_threshold_belong_together():
    assert options("--policy", "typical").engine.drafting == Drafting(typical=TYPICAL_THRESHOLD)
    assert options("--policy", "typical", "--typical-threshold", "0.3").engine.drafting.typical == 0.3
    with pytest.raises(UserError, match="--typical-threshold is of --policy typical"):
        options("--typical-threshold", "0.3")
    with pytest.raises(UserError, match="above 0 and at most 1"):
        options("--policy", "typical", "--typical-threshold", "0")
    for flags in (["--drafter", "none"], ["--width", "0"]):
        with pytest.raises(UserError, match="there are none"):
            options("--policy", "typical", *flags)


@pytest.mark.parametrize(
    ("flags", "name"),
    [(["--block", "1"], "block"), (["--draft-window", "0"], "window"), (["--max-rows", "0"], "max-rows")],
)
def test_what_cannot_be_meant_is_refused_by_name(flags, name):
    with pytest.raises(UserError, match=name):
        options(*flags)


@pytest.mark.parametrize("block", [True, 2.5, "4"])
def test_a_block_that_is_no_number_is_refused(block):
    with pytest.raises(UserError, match="block"):
        Drafting(block=block)


def test_engines_know_no_more_than_twelve_settings():
    """The house rule; whoever adds one groups."""
    assert len(fields(EngineConfig)) <= 12


# What they do to a drafter


def narrowed(**drafting: Any) -> DrafterConfig:
    config = DrafterChoice("tiny", (TINY_DRAFTER, {})).narrowed(Drafting(**drafting)).config
    assert config is not None
    return config


def test_a_drafter_is_narrowed_and_never_widened():
    assert narrowed() == TINY_DRAFTER
    assert narrowed(block=4).max_drafts == 3 and narrowed(block=99) == TINY_DRAFTER
    assert narrowed(window=8).windows == (8, 8)
    assert DrafterChoice("none").narrowed(Drafting(block=4)).config is None


@pytest.mark.parametrize("packed", [False, True], ids=["reference", "kernels"])
@pytest.mark.parametrize("drafting", [{"block": 3}, {"window": 5}, {"block": 4, "window": 20}], ids=str)
def test_a_narrower_drafter_leaves_the_output_as_it_is(drafting, packed):
    """L1, L3: neither the block nor the horizon is in the answer."""
    if packed and instruction_set() is None:
        pytest.skip("the CPU kernels were not built")
    config = narrowed(**drafting)
    for sampling in ({}, {"temperature": 0.9, "seed": 4}):
        stops = StopParams(max_tokens=40, ignore_eos=True)
        plain, drafted = (make_request(prompt_of(50), stops, **sampling) for _ in range(2))
        target, drafter = make_target(packed=packed), make_drafter(config, packed=packed)
        run(make_engine(target), [plain])
        run(make_engine(target, drafter=drafter, dflash=True, width=config.max_drafts), [drafted])
        assert drafted.output_ids == plain.output_ids
        assert drafted.stats.num_draft_tokens <= config.max_drafts * drafted.stats.num_spec_steps


def test_what_results_is_told_at_load():
    """Design principle 6: the effective block, horizon and policy."""
    drafting = Drafting(block=4, window=64, typical=0.2)
    info = load_model("smollm2", "auto", EngineConfig(max_context=256, drafting=drafting), None, None)[0].info
    assert (info["dflash"]["block_size"], info["dflash"]["max_drafts"], info["dflash"]["window"]) == (4, 3, 64)
    assert (info["policy"], info["lossless"], info["typical_threshold"]) == ("typical", False, 0.2)


def test_a_width_beyond_the_narrowed_block_is_refused():
    """It would be narrowed without a word."""
    config = EngineConfig(max_context=256, width=5, drafting=Drafting(block=4))
    with pytest.raises(UserError, match="offers 3 drafts at most"):
        load_model("smollm2", "dflash", config, None, None)


# Thinking


def test_thinking_is_the_default_of_chats_and_a_request_s_own_word_goes_first():
    loaded = with_thinking(replace(tiny_loaded(), chat_template=SWITCH), False)
    assert loaded.info["thinking"] == "off"
    messages = [{"role": "user", "content": "Hi"}]
    with LLM(loaded, config_of()) as llm:
        told = llm.tokenizer.decode(llm.encode(messages))
        assert told.endswith("<think></think>")
        assert llm.tokenizer.decode(llm.make_request(messages).prompt_ids) == told
        request = llm.make_request(messages, chat_template_kwargs={"enable_thinking": True})
        assert not llm.tokenizer.decode(request.prompt_ids).endswith("</think>")


def test_a_template_without_the_mode_is_refused_if_the_flag_was_given_and_left_alone_by_a_preset(monkeypatch, capsys):
    """Fail loudly; but a preset is for all models."""
    monkeypatch.setattr(cli_options, "load_model", lambda *_: (tiny_loaded(), EngineConfig()))
    with pytest.raises(UserError, match="cannot be told to think"):
        options("--thinking", "off").load_parts()
    assert options("--preset", "chat").load_parts()[0].template_defaults == {}
    capsys.readouterr()
