"""The HTML report: one file with everything in it, for light and dark."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lampejo.bench import plots
from lampejo.bench.report import headline, terminal

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1e21; --soft: #666b73; --line: #dfe2e6;
  --c0: #6b7280; --c1: #2f6fde; --c2: #d9822b; --c3: #1f9d63; --c4: #a34fc4; --c5: #c43d4b; }
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --text: #e7e9ec; --soft: #9aa0a8; --line: #33373d;
  --c0: #8d949e; --c1: #6ea3ff; --c2: #f0a65a; --c3: #4cc98d; --c4: #c98ae2; --c5: #ec7883; } }
body { background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; max-width: 760px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } small, .soft { color: var(--soft); } pre { overflow-x: auto; font-size: 0.8rem; }
figure { margin: 2rem 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--line); }
.mark { stroke: var(--text); stroke-dasharray: 4 4; } polyline { fill: none; stroke-width: 2; }
.failed { color: var(--c5); font-weight: 600; }
"""


def make_page(found: Mapping[str, Any], notes: Sequence[str], failures: Sequence[str]) -> str:
    """The page of one run, from its JSON object."""
    colors = "".join(
        f".c{i} {{ fill: var(--c{i}); }} .s{i} {{ stroke: var(--c{i}); }}\n" for i in range(plots.NUM_COLORS)
    )
    mode = "<br/>".join(escape(line) for line in headline(found).splitlines())
    failed = "".join(f'<p class="failed">failed: {escape(failure)}</p>' for failure in failures)
    plotted = "\n".join(figures(found))
    tables = escape(terminal(found, notes))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>lampejo bench: {escape(str(found['model']['model']))}</title><style>{_STYLE}{colors}</style></head>\n"
        f'<body><h1>lampejo bench</h1><p class="soft">{mode}</p>{failed}\n'
        f"{plotted}\n<h2>All figures</h2><pre>{tables}</pre></body></html>\n"
    )


def figures(found: Mapping[str, Any]) -> list[str]:
    """Plots of what was measured; none of what was not."""
    made = []
    arms, categories = list(found["arms"]), found["categories"]
    drafting = [arm for arm in arms if arm != "plain"]
    if categories and drafting:
        speedups = {arm: [categories[name][arm]["speedup"] for name in categories] for arm in drafting}
        made.append(plots.bars("Speed against plain decoding", "times", list(categories), speedups, mark=1.0))
    if categories:
        speeds = {arm: [categories[name][arm]["tok_per_s"] for name in categories] for arm in arms}
        made.append(plots.bars("Decoding speed", "tok/s", list(categories), speeds))
        lengths = {arm: [categories[name][arm]["mean_acceptance_length"] for name in categories] for arm in drafting}
        if drafting:
            made.append(plots.bars("Acceptance length", "tokens per step", list(categories), lengths, mark=1.0))
    slots = {arm: found["arms"][arm]["acceptance_per_slot"] for arm in drafting}
    most = max(map(len, slots.values()), default=0)
    if most:
        padded = {arm: [*rates, *[None] * (most - len(rates))] for arm, rates in slots.items() if rates}
        title = "Acceptance per slot, given that all slots before were accepted"
        made.append(plots.lines(title, "part", [float(i + 1) for i in range(most)], padded))
    if found["verify_cost"]:
        cost = list(found["verify_cost"].values())
        xs = [float(size) for size in found["verify_cost"]]
        made.append(
            plots.lines(
                "Cost of verifying tokens at once", "times one token", xs, {"cost": cost, "free": [1.0] * len(xs)}
            )
        )
    if found["concurrency"]:
        names = list(dict.fromkeys(name for speeds in found["concurrency"].values() for name in speeds))
        at_once = {
            name: [speeds.get(name, {}).get("tok_per_s") for speeds in found["concurrency"].values()] for name in names
        }
        labels = [f"{n} at once" for n in found["concurrency"]]
        made.append(plots.bars("Requests at once, prompts included", "tok/s", labels, at_once))
    if found["prefill"]:
        prefill = {"lampejo": [one["tok_per_s"] for one in found["prefill"].values()]}
        made.append(plots.bars("Prompts", "tok/s", [f"{n} tokens" for n in found["prefill"]], prefill))
    for name, peer in found["peers"].items():
        ours, ratio = peer["ours"], peer["ratio"]
        if ratio["plain"]:
            pair = {
                "lampejo": [ours["plain_tok_per_s"], ours["prefill_tok_per_s"]],
                name: [peer["plain_tok_per_s"], peer["prefill_tok_per_s"]],
            }
            made.append(plots.bars(f"Beside {name}", "tok/s", ["plain decoding", "prompt of 512"], pair))
    return made
