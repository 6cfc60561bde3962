"""Measuring a CPU: what is made of measurements. No test here looks at a clock."""

import pytest

from lampejo.errors import UserError
from lampejo.ops.cpu import instruction_set
from lampejo.plan.calibrate import TOKENS, Cpu, at, calibrate
from lampejo.plan.planner import Wish, make_plan
from lampejo.plan.precision import CPU_PRECISIONS
from lampejo.plan.roofline import Work
from lampejo.plan.sources import Target
from tiny import TINY


def test_rates_between_the_measured_points_lie_on_lines():
    rates = {1: 1.0, 2: 2.0, 4: 6.0}
    assert [at(rates, n) for n in (0.5, 1, 1.5, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 10.0]


def test_a_pass_costs_the_sum_of_its_parts():
    """Fault: bytes of one kind at the rate of another."""
    rates = {1: 1.0, 2: 3.0}
    cpu = Cpu("test", 1 << 30, 10.0, 100.0, rates, {1: 0.1, 2: 0.1}, {1: 0.01, 2: 0.02})
    work = Work(2, dense=5.0, head=7.0, experts=0.0, context=100.0, state=0.0, flops=1.0, layers=1)
    assert cpu.seconds(work, 2).expected == pytest.approx(5 * 3.0 + 7 * 0.1 + 100 * 0.02, rel=1e-3)
    assert cpu.draft_seconds(work, 1).expected == pytest.approx((5 + 7) * 0.1 + 100 * 0.01, rel=1e-3)
    assert cpu.seconds(work, 2).limit == pytest.approx(112 / 10.0)


@pytest.mark.skipif(instruction_set() is None, reason="the CPU kernels were not built")
def test_a_machine_can_be_measured_and_planned_for():
    """From the configuration alone: no weights are read."""
    cpu = calibrate(TINY, 5.0, threads=1)
    assert all(set(rates) == set(TOKENS) for rates in (cpu.layer, cpu.matrix, cpu.context))
    assert all(rate > 0 for rates in (cpu.layer, cpu.matrix, cpu.context) for rate in rates.values())
    plan = make_plan(Target("tiny", TINY, "test"), None, cpu, [CPU_PRECISIONS["q4"]], Wish(32), (1,))
    assert plan.chosen is not None and plan.chosen.steps[0].expected[0] > 0


@pytest.mark.skipif(instruction_set() is None, reason="the CPU kernels were not built")
def test_heads_that_the_kernels_do_not_know_are_refused():
    from dataclasses import replace

    with pytest.raises(UserError, match="do not know heads of 20"):
        calibrate(replace(TINY, head_dim=20), 5.0)


def test_without_kernels_a_gpu_is_named_as_the_way_out(monkeypatch):
    monkeypatch.setattr("lampejo.plan.calibrate.LIBRARY", None)
    with pytest.raises(UserError, match="not there to measure") as caught:
        calibrate(TINY, 5.0)
    assert "--gpu" in caught.value.remedy
