"""The work of a step and its time: properties that any such model must have, and speeds that others published."""

import itertools
from dataclasses import replace

import pytest

from lampejo.models.hf_config import model_config_from_hf
from lampejo.plan.hardware import DEVICES
from lampejo.plan.planner import Wish, make_plan
from lampejo.plan.precision import GPU_PRECISIONS
from lampejo.plan.published import TARGETS
from lampejo.plan.roofline import Model, committed, distinct_share, seconds, verify_work
from lampejo.plan.sizes import count
from lampejo.plan.sources import find_drafter_for, find_target


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("lampejo.plan.sources.fetch_config", lambda repo, revision: None)


def model_of(name, precision="bf16"):
    config = model_config_from_hf(TARGETS[name].config)
    parameters = count(config)
    return Model(config, parameters, GPU_PRECISIONS[precision].bytes(parameters), precision)


def test_distinct_experts_are_those_of_independent_choices():
    """E * (1 - (1 - k/E)^b): one token goes to k, 8 and 16 to a quarter and two fifths of 256, many to all."""
    assert distinct_share(8 / 256, 1) == pytest.approx(8 / 256)
    assert distinct_share(8 / 256, 8) == pytest.approx(0.224, abs=0.001)
    assert distinct_share(8 / 256, 16) == pytest.approx(0.398, abs=0.001)
    assert distinct_share(8 / 256, 10_000) == pytest.approx(1.0)


def test_neighbours_that_share_experts_read_fewer():
    """Two measurements from elsewhere lie on both sides: 1.74 times for 2 tokens, 2.5 times for 4."""
    model = model_of("Qwen/Qwen3.5-122B-A10B")
    shares = {
        r: [verify_work(model, 1, w, 0, r).expert_share for w in (0, 1, 3)] for r in ("independent", "correlated")
    }
    assert shares["independent"][0] == shares["correlated"][0]
    assert all(c < i for c, i in zip(shares["correlated"][1:], shares["independent"][1:], strict=True))
    assert 1.5 < shares["correlated"][1] / shares["correlated"][0] < 1.8
    assert 2.5 < shares["correlated"][2] / shares["correlated"][0] < 3.2


def test_a_step_of_one_token_reads_the_active_weights_once():
    """The plain step of the 122B in bf16: all but the embedding and the experts that no one asked, and its request."""
    model = model_of("Qwen/Qwen3.5-122B-A10B")
    work = verify_work(model, 1, 0, 1000)
    parameters = model.parameters
    read = parameters.mixers + parameters.mlp + parameters.head + parameters.experts * 8 / 256
    assert work.dense + work.head + work.experts == pytest.approx(2 * read)
    assert work.context == 1001 * 24_576 and work.state == pytest.approx(2 * 156.3e6, rel=0.01)
    assert work.flops == pytest.approx(2 * read, rel=0.05)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-122B-A10B"])
def test_more_of_anything_never_costs_less(name):
    """Fault: a term with the wrong sign, or one that is divided by what it should be multiplied with."""
    model, device = model_of(name), DEVICES["h200"]

    def cost(requests=1, width=4, context=1000, devices=1, on=device):
        found = seconds(verify_work(model, requests, width, context), on, devices, "bf16", model.config.num_kv_heads)
        assert 0 < found.limit < found.expected
        return found.limit, found.expected

    base = cost()
    for more in ({"requests": 2}, {"width": 9}, {"context": 30_000}, {"on": replace(device, bandwidth=1e12)}):
        assert all(m > b for m, b in zip(cost(**more), base, strict=True)), more
    assert cost(devices=2)[0] < base[0]
    # Whatever the batch, a token of a larger one never costs more.
    assert cost(requests=8, width=0)[0] / 8 <= cost(requests=1, width=0)[0]


def test_keys_and_values_are_not_split_beyond_their_heads():
    """Fault: eight devices that hold an eighth of 2 heads each."""
    model = model_of("Qwen/Qwen3.5-122B-A10B")
    work = replace(verify_work(model, 1, 0, 1000), dense=0.0, head=0.0, experts=0.0, state=0.0, flops=0.0)
    times = [seconds(work, DEVICES["b200"], n, "bf16", 2).limit for n in (1, 2, 4, 8)]
    assert times[1] == pytest.approx(times[0] / 2) and times[3] == times[2] == times[1]


def test_prefill_sized_steps_are_bound_by_operations():
    """Fault: a roofline that only knows bandwidth."""
    model = model_of("Qwen/Qwen3-8B")
    work = verify_work(model, 64, 63, 0)
    assert seconds(work, DEVICES["h100"], 1, "bf16", 8).limit == pytest.approx(work.flops / DEVICES["h100"].bf16)


def test_narrow_blocks_commit_the_first_terms_of_the_full_one():
    """The full block gives what was asked for, width 0 one token; each further draft adds less."""
    lengths = [committed(6.0, 15, width) for width in range(16)]
    gains = [b - a for a, b in itertools.pairwise(lengths)]
    assert lengths[0] == pytest.approx(1.0) and lengths[15] == pytest.approx(6.0)
    assert all(0 < b < a for a, b in itertools.pairwise(gains))
    assert committed(1.0, 15, 7) == pytest.approx(1.0) and committed(16.0, 15, 7) == pytest.approx(8.0)


# Speeds of one request that others published, tok/s; plain, or with a full block at the acceptance length they state.
# huggingface.co/ultimatechris/Ornith-1.5-9B-DFlash-SGLang and -35B-A3B-: SGLang, the sizes of Qwen3.5 (6.5 and 8.5,
# 6.1 and 7.7 tokens accepted on GSM8K and HumanEval, their mean here). huggingface.co/z-lab/Qwen3.5-122B-A10B-DFlash:
# SGLang, plain. github.com/sgl-project/sglang pull request 19952: plain.
PUBLISHED = [
    ("Qwen/Qwen3.5-9B", "l40s", 1, None, 44.8),
    ("Qwen/Qwen3.5-9B", "l40s", 1, 7.5, 207.5),
    ("Qwen/Qwen3.5-35B-A3B", "a100", 2, None, 202.5),
    ("Qwen/Qwen3.5-35B-A3B", "a100", 2, 6.9, 470.2),
    ("Qwen/Qwen3.5-122B-A10B", "b200", 4, None, 262.0),
    ("Qwen/Qwen3.5-27B", "h100", 4, None, 103.6),
]


def speed(name, device, devices, length, width):
    target = find_target(name)
    plan = make_plan(
        target,
        find_drafter_for(target, "auto"),
        DEVICES[device],
        [GPU_PRECISIONS["bf16"]],
        Wish(1024, acceptance=(length,)),
        (devices,),
    )
    return plan.ways[0].steps[width].expected[0]


@pytest.mark.parametrize(("name", "device", "devices", "length", "measured"), PUBLISHED)
def test_expected_speeds_are_within_a_quarter_of_published_ones(name, device, devices, length, measured):
    """Fault: "expected" figures that no engine has ever shown. The constants in hardware.py were fitted to these."""
    expected = speed(name, device, devices, length or 5.0, 15 if length else 0)
    assert expected == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("length", "block_16", "block_8"), [(5.45, 671.5, 690.1), (7.2, 884.4, 849.5), (8.85, 1088.9, 948.9)]
)
def test_one_acceptance_length_explains_both_published_block_sizes(length, block_16, block_8):
    """The 122B on 4 B200 (its drafter's card: MT-Bench, GSM8K, HumanEval): slots are alike enough there."""
    assert speed("Qwen/Qwen3.5-122B-A10B", "b200", 4, length, 15) == pytest.approx(block_16, rel=0.05)
    assert speed("Qwen/Qwen3.5-122B-A10B", "b200", 4, length, 7) == pytest.approx(block_8, rel=0.05)
