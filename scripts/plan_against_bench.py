"""Holds the planner's prediction for the default model on this CPU against the benchmark.

The prediction is made before and after the benchmark, from the configuration alone; it should lie within a quarter.

    python scripts/plan_against_bench.py
"""

import json
import subprocess
import sys
from typing import Any

VERIFIED = (2, 4, 6, 8, 12, 16)  # tokens
PLAIN_CONTEXT, VERIFY_CONTEXT = (
    200,
    128,
)  # tokens before: of the benchmark's prompts with half an answer; of its cost curve


def main() -> None:
    before = predict()
    measured = run("bench", "--suite", "quick", "--arms", "plain", "--sections", "categories,verify", "--json")
    after = predict()
    print("| | predicted | measured | ratio |")
    print("|---|---|---|---|")
    rows = {"plain decoding, tok/s": (measured["arms"]["plain"]["tok_per_s"], ".0f")}
    rows |= {f"verifying {n} tokens over one": (measured["verify_cost"][str(n)], ".2f") for n in VERIFIED}
    worst = 1.0
    for name, (value, shape) in rows.items():
        predicted = (before[name] + after[name]) / 2
        worst = max(worst, predicted / value, value / predicted)
        print(f"| {name} | {predicted:{shape}} | {value:{shape}} | {predicted / value:.2f} |")
    print(f"\nworst: {worst:.2f}; other cores busy: {measured['machine']['other_cores_busy']}", file=sys.stderr)


def predict() -> dict[str, float]:
    plain, verify = (steps(context) for context in (PLAIN_CONTEXT, VERIFY_CONTEXT))
    found = {"plain decoding, tok/s": plain[0]["tok_per_s"][0]["expected"]}
    costs = [step["verify_s"]["expected"] for step in verify]
    return found | {f"verifying {n} tokens over one": costs[n - 1] / costs[0] for n in VERIFIED}


def steps(context: int) -> list[dict[str, Any]]:
    plan = run("plan", "smollm2", "--cpu", "--drafter", "none", "--context", str(context), "--json")
    found: list[dict[str, Any]] = plan["ways"][0]["steps"]
    return found


def run(*command: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "lampejo", *command], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
