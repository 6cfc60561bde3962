"""Medians, spreads, ratios."""

import pytest

from lampejo.bench.stats import median, ratios, rounded, spread, summary, with_sampled
from tiny_bench import sample


def test_ratios_are_formed_per_prompt_and_round_before_they_are_summarised():
    """Fault: a ratio of two medians compares different prompts, at different times of a noisy machine."""
    samples = [
        sample("plain", 100.0, prompt=0),
        sample("auto", 200.0, prompt=0),
        sample("plain", 10.0, prompt=1),
        sample("auto", 15.0, prompt=1),
    ]
    assert sorted(ratios(samples, "auto")) == [1.5, 2.0]


def test_rounds_of_a_prompt_count_once():
    """Fault: a prompt measured more often than others weighs more."""
    samples = [sample(arm, speed, run=run) for run, speed in enumerate((100.0, 50.0)) for arm in ("plain",)]
    samples += [sample("auto", 200.0, run=0), sample("auto", 150.0, run=1)]
    assert ratios(samples, "auto") == [2.5]


def test_a_sample_without_its_partner_makes_no_ratio():
    """V3: what failed is not timed, and does not leave a ratio to something else."""
    samples = [sample("plain", 100.0, prompt=0), sample("auto", 200.0, prompt=1)]
    assert ratios(samples, "auto") == []
    assert summary(samples, "auto")["speedup"] is None


def test_an_answer_of_one_token_has_no_speed():
    """V3: nothing to divide by, so nothing is claimed."""
    figures = summary([sample("plain", None)], "plain")
    assert figures["tok_per_s"] is None and figures["ttft_s"] == 0.1


def test_greedy_and_sampled_answers_are_told_apart():
    """Fault: two workloads in one figure."""
    samples = [sample("plain", 100.0), sample("plain", 10.0, sampled=True)]
    figures = with_sampled(samples, "plain")
    assert figures["tok_per_s"] == 100.0 and figures["sampled"]["tok_per_s"] == 10.0
    assert "sampled" not in with_sampled(samples[:1], "plain")


def test_the_acceptance_length_weighs_steps_and_not_answers():
    """Fault: a short answer counts as much as a long one."""
    samples = [
        sample("auto", num_spec_steps=1, num_spec_tokens=4.0),
        sample("auto", prompt=1, num_spec_steps=9, num_spec_tokens=9.0),
    ]
    assert summary(samples, "auto")["mean_acceptance_length"] == 1.3
    assert summary([sample("auto", num_spec_steps=0)], "auto")["mean_acceptance_length"] is None
    assert summary([sample("plain")], "plain")["mean_acceptance_length"] == 1.0


def test_spread_is_half_the_distance_of_the_quartiles():
    assert spread([80.0, 90.0, 100.0, 110.0, 120.0]) == pytest.approx(0.1)
    assert spread([1.0, 2.0]) is None
    assert median([]) is None


def test_rounding_keeps_whole_numbers_and_makes_keys_strings():
    """Fault: JSON has no whole keys; a count of tokens must not be rounded."""
    assert rounded({4: [1.23456, 123456, None, "x"]}) == {"4": [1.235, 123456, None, "x"]}
