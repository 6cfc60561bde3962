"""What fits, what is chosen, what is told."""

import json

import pytest

from lampejo.plan.hardware import DEVICES
from lampejo.plan.planner import Wish, make_plan, reaches, with_routing
from lampejo.plan.precision import GPU_PRECISIONS
from lampejo.plan.report import answer, as_object, terminal
from lampejo.plan.sources import find_drafter_for, find_target

ALL = list(GPU_PRECISIONS.values())


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("lampejo.plan.sources.fetch_config", lambda repo, revision: None)


def plan_of(name, gpu, precisions=ALL, counts=(1, 2, 4, 8), drafter="auto", **wish):
    target = find_target(name)
    wish = Wish(**{"context": 4096, "acceptance": (5.0, 7.0, 9.0), **wish})
    return make_plan(target, find_drafter_for(target, drafter), DEVICES[gpu], precisions, wish, counts)


def test_one_b200_and_1000_tokens_a_second_on_the_122b():
    """The question that the planner is for, answered without a network."""
    plan = plan_of("Qwen/Qwen3.5-122B-A10B", "b200", goal=1000.0)
    ways = {(way.precision.name, way.num_devices): way for way in plan.ways}
    assert [ways[name, 1].fits for name in ("bf16", "fp8", "fp4")] == [False, True, True]
    assert (plan.chosen.precision.name, plan.chosen.num_devices) == ("fp4", 1)
    # In fp8 the limit allows it, and a good engine should not reach it; at short acceptance lengths neither.
    fp8 = ways["fp8", 1]
    assert max(step.limits[2] for step in fp8.steps) > 1000 > fp8.best(2).expected[2]
    assert plan.chosen.best(0).expected[0] < 1000
    told = answer(plan)
    assert "bf16 does not fit" in told and "1,000 tok/s on one device: yes, in fp4." in told
    assert "for 1,000 it takes 2 x B200" in told and "computed and not measured" in told


def test_the_goal_is_told_as_out_of_reach_where_it_is():
    plan = plan_of("Qwen/Qwen3.5-122B-A10B", "h200", [GPU_PRECISIONS["fp8"]], (1,), goal=1000.0)
    assert plan.chosen is not None and not reaches(plan, plan.chosen, plan.guess)
    assert "1,000 tok/s on one device: no; the most is" in answer(plan)
    near = plan_of("Qwen/Qwen3.5-122B-A10B", "b200", [GPU_PRECISIONS["fp8"]], (1,), goal=1000.0)
    assert "within the limit of the hardware, but more than a good engine should reach" in answer(near)


def test_memory_decides_how_many_devices_it_takes():
    """The 122B on cards of 24 GB: eight of them in fp8, four in fp4, none of the others."""
    plan = plan_of("Qwen/Qwen3.5-122B-A10B", "rtx4090")
    fits = {(way.precision.name, way.num_devices) for way in plan.ways if way.fits}
    assert fits == {("fp8", 8), ("fp4", 4), ("fp4", 8)}
    assert plan.chosen.num_devices == 4
    nothing = plan_of("Qwen/Qwen3.5-122B-A10B", "rtx4090", counts=(1, 2))
    assert nothing.chosen is None and "does not fit" in answer(nothing)
    assert as_object(nothing)["recommended"] is None and "does not fit" in terminal(nothing)


@pytest.mark.parametrize("more", [{"context": 200_000}, {"concurrency": 32}])
def test_requests_take_memory_and_time(more):
    """Fault: keys and values, states or the drafter's context left out."""
    base = plan_of("Qwen/Qwen3.5-27B", "h200", [GPU_PRECISIONS["bf16"]], (1,))
    large = plan_of("Qwen/Qwen3.5-27B", "h200", [GPU_PRECISIONS["bf16"]], (1,), **more)
    assert large.ways[0].needed > base.ways[0].needed
    assert large.ways[0].best(1).expected[1] < base.ways[0].best(1).expected[1]
    assert large.ways[0].memory["drafter's context"] > base.ways[0].memory["drafter's context"]


def test_the_context_that_fits_does_fit_and_no_more():
    """Fault: a promise of context that the next plan takes back."""
    plan = plan_of("Qwen/Qwen3-8B", "rtx4090", [GPU_PRECISIONS["bf16"]], (1,))
    fitting = plan.context_that_fits
    assert plan_of("Qwen/Qwen3-8B", "rtx4090", plan_precisions(plan), (1,), context=fitting).ways[0].fits
    assert not plan_of("Qwen/Qwen3-8B", "rtx4090", plan_precisions(plan), (1,), context=fitting + 64).ways[0].fits


def plan_precisions(plan):
    return [plan.chosen.precision]


def test_the_recommended_width_is_the_fastest_of_all():
    plan = plan_of("Qwen/Qwen3.5-35B-A3B", "h200", [GPU_PRECISIONS["fp8"]], (1,))
    way = plan.chosen
    assert [step.width for step in way.steps] == list(range(16))
    assert way.best(1).expected[1] == max(step.expected[1] for step in way.steps)
    # Better drafts ask for wider blocks, and shared experts make them cheaper.
    assert way.best(0).width <= way.best(1).width <= way.best(2).width
    assert with_routing(plan, way, "correlated").best(1).expected[1] > way.best(1).expected[1]


def test_without_a_drafter_only_the_cost_of_verifying_is_told():
    """Fault: speeds of drafts that nobody makes."""
    plan = plan_of("Qwen/Qwen3-30B-A3B", "h100")
    assert plan.drafter is None and plan.chosen.best(0).width == 0
    assert "No DFlash drafter takes part" in answer(plan) and "pays from" in terminal(plan)
    assert plan_of("Qwen/Qwen3-8B", "h100", drafter="none").drafter is None


def test_json_holds_everything_in_plain_numbers():
    """The shape that scripts rely on."""
    plan = plan_of("Qwen/Qwen3.5-122B-A10B", "b200", counts=(1,), goal=1000.0)
    found = json.loads(json.dumps(as_object(plan)))
    assert list(found) == [
        "answer", "model", "drafter", "hardware", "wish", "ways", "recommended", "assumptions",
    ]  # fmt: skip
    assert found["model"]["parameters"]["total"] == 122_111_526_912
    assert found["hardware"]["measured"] is False and found["hardware"]["bytes_per_s"] == 7.68e12
    assert found["drafter"]["block_size"] == 16 and found["wish"]["acceptance"] == [5, 7, 9]
    fp8 = found["ways"][1]
    assert (fp8["precision"], fp8["fits"], len(fp8["steps"])) == ("fp8", True, 16)
    step = fp8["steps"][7]
    assert set(step) == {"width", "bytes", "flops", "expert_share", "verify_s", "draft_s", "tok_per_s"}
    assert 26e9 < step["bytes"] < 35e9  # a quarter of the experts, and the rest once
    assert step["verify_s"]["limit"] < step["verify_s"]["expected"]
    assert [set(one) for one in step["tok_per_s"]] == [{"committed", "expected", "limit"}] * 3
    assert found["recommended"]["devices"] == 1 and found["recommended"]["precision"] == "fp4"


def test_what_was_inferred_is_told():
    """Fault: a guess of ours that reads like a published size."""
    told = terminal(plan_of("Qwen/Qwen3-Coder-Next", "h200"))
    assert "inferred, not published, of the drafter: MLP size, heads, taps" in told
    assert "inferred" not in terminal(plan_of("Qwen/Qwen3.5-122B-A10B", "h200"))


def test_drafts_that_do_not_pay_are_told_so():
    """Fault: the speed of plain decoding under the name of a drafter."""
    plan = plan_of(
        "Qwen/Qwen3.5-35B-A3B", "rtx4090", [GPU_PRECISIONS["fp4"]], (1,), acceptance=(1.01, 1.02, 6.0), goal=1.0
    )
    assert plan.guess == 0 and plan.chosen.best(0).width == 0
    assert "plain decoding" in answer(plan) and "at an acceptance length of 1.01" not in answer(plan)
    middle = plan_of("Qwen/Qwen3.5-35B-A3B", "rtx4090", [GPU_PRECISIONS["fp4"]], (1,), acceptance=(1.01, 6.0, 6.0))
    assert "At an acceptance length of 1.01 drafts do not pay." in answer(middle)
