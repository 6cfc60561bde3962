"""The JSON object, the tables, the page."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from lampejo.bench import plots
from lampejo.bench.measure import Results
from lampejo.bench.page import make_page
from lampejo.bench.report import as_object, terminal, times, verify_cost
from lampejo.terminal import columns, number
from tiny_bench import MACHINE, MODEL, made_results

KEYS = [
    "machine",
    "model",
    "arms",
    "categories",
    "concurrency",
    "verify_cost",
    "prefill",
    "peak_rss_mb",
    "start_to_first_token_s",
    "peers",
    "failed",
]


def made():
    return as_object(made_results(), MACHINE, MODEL)


def test_the_object_has_the_promised_shape():
    """Scripts read these names."""
    found = json.loads(json.dumps(made()))
    assert list(found) == KEYS
    for figures in (found["arms"]["auto"], found["categories"]["chat"]["auto"]):
        assert {"tok_per_s", "ttft_s", "mean_acceptance_length"} <= set(figures)
    assert found["arms"]["auto"]["speedup"] == 2.0 and found["arms"]["auto"]["sampled"]["speedup"] == 2.0
    assert found["concurrency"]["1"]["auto"] == {"tok_per_s": 19.0, "speedup": 1.75}
    assert found["concurrency"]["4"]["auto"]["speedup"] == 1.25
    assert found["prefill"]["300"]["tok_per_s"] == 600.0
    assert found["start_to_first_token_s"] == 1.5 and found["peak_rss_mb"] == 512.2
    assert found["failed"] == 0


def test_peers_are_compared_round_by_round():
    """PERFORMANCE: ratios of one run, of neighbours in time."""
    peer = made()["peers"]["llama.cpp"]
    assert (peer["plain_tok_per_s"], peer["prefill_tok_per_s"]) == (80.0, 105.0)
    assert peer["concurrency"] == {"1": 5.5, "4": 9.5}
    assert peer["ratio"]["plain"] == 2.0 and peer["ratio"]["prefill"] == 2.5
    assert peer["ratio"]["concurrency"]["1"] == {"plain": 2.0, "auto": 3.5}


def test_the_cost_of_verifying_is_relative_to_one_token_of_the_same_round():
    assert verify_cost({1: [1.0, 2.0], 4: [1.5, 4.0]}) == {1: 1.0, 4: 1.75}


def test_nothing_measured_still_makes_an_object_and_a_table():
    """V3: everything failed; the report says so instead of failing too."""
    results = Results(["plain"], failures=["chat 1, plain: no"])
    found = as_object(results, MACHINE, MODEL)
    assert list(found) == KEYS and found["failed"] == 1 and found["arms"] == {}
    assert found["start_to_first_token_s"] is None
    terminal(found, [])
    ElementTree.fromstring(make_page(found, [], results.failures).partition("\n")[2])


def test_the_table_states_the_mode_and_the_figures():
    """V3: thinking mode, template, device, precision; then every section."""
    text = terminal(made(), ["ended early"])
    for part in ("thinking", "chat template", "cpu float32", "ops reference", "2 threads", "note: ended early"):
        assert part in text
    assert re.search(r"^chat +100 ±\d+% +2\.00x \(2\.5\) +auto 2\.00x$", text, re.MULTILINE)
    assert re.search(r"^plain, fixed length +150 +80 +2\.00x", text, re.MULTILINE)


def test_a_lossy_policy_has_a_table_of_its_own():
    """What is given up stands beside what is won; a lossless run has no such table."""
    lossy = {**MODEL, "policy": "typical", "lossless": False, "typical_threshold": 0.09}
    results = made_results()
    results.samples = [replace(s, num_inexact=1, is_same=False) if s.arm == "auto" else s for s in results.samples]
    text = terminal(as_object(results, MACHINE, lossy), [])
    assert "NOT LOSSLESS, typical from 0.09, at 0.7" in text
    assert re.search(r"^auto +150 +2\.00x +2\.5 +10\.0% +0%$", text, re.MULTILINE)
    assert "LOSSLESS" not in terminal(made(), [])


def test_the_page_is_well_formed_and_needs_nothing_else():
    """Self-contained, light and dark; names of models and machines are no markup."""
    page = make_page(made(), ["a < b"], ["chat 1, auto: <differs>"])
    root = ElementTree.fromstring(page.partition("\n")[2])
    assert len(root.findall(".//svg")) == 8
    assert not re.search(r"https?:|src=|href=|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page
    assert "<differs>" not in page and "tiny &amp; small" in page


@pytest.mark.parametrize("most", [0.003, 0.7, 1.0, 3.14, 99.0, 12345.0])
def test_axes_end_above_the_largest_value_with_few_ticks(most):
    top, ticks = plots._scale({"a": [most, None]}, None)
    assert most <= top * 1.0001 and ticks[-1] == pytest.approx(top) and 2 <= len(ticks) <= 7


def test_plots_of_nothing_are_drawn_too():
    """Fault: an empty series divides by zero."""
    ElementTree.fromstring(plots.bars("t", "u", ["a"], {"x": [None]}))
    ElementTree.fromstring(plots.lines("t", "u", [1.0], {"x": [0.0]}))


def test_columns_line_up():
    assert columns(["a", "bb"], [["long", "1"], ["x"]]).splitlines() == ["a     bb", "--------", "long   1", "x"]


def test_numbers_for_people():
    assert [number(v) for v in (None, 0.1234, 12.34, 123.4, 12345.0)] == ["-", "0.123", "12.3", "123", "12345"]
    assert times(None) == "-" and times(1.234) == "1.23x"
