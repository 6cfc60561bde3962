"""Results as one JSON object and as a table for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from lampejo.bench.measure import Results
from lampejo.bench.stats import median, rounded, spread, with_sampled
from lampejo.terminal import columns, number


def as_object(results: Results, machine: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--json`` prints. What was not measured is empty or null, never a guess."""
    samples = results.samples
    arms = [arm for arm in results.arms if any(s.arm == arm for s in samples)]
    names = list(dict.fromkeys(s.category for s in samples))
    return rounded(
        {
            "machine": machine,
            "model": model,
            "arms": {
                arm: {**with_sampled(samples, arm), "acceptance_per_slot": results.slots.get(arm, [])} for arm in arms
            },
            "categories": {
                name: {arm: with_sampled([s for s in samples if s.category == name], arm) for arm in arms}
                for name in names
            },
            "concurrency": {n: _speeds(found) for n, found in results.concurrency.items()},
            "verify_cost": verify_cost(results.verify),
            "prefill": {n: _length(found) for n, found in results.lengths.items()},
            "peak_rss_mb": results.peak_rss_mb,
            "start_to_first_token_s": median(results.start_s),
            "peers": {name: _peer(name, found, results) for name, found in results.peers.items()},
            "failed": len(results.failures),
        }
    )


def verify_cost(seconds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Per number of tokens: how many times the cost of one, the median of the ratios within each round."""
    cost = {}
    for size, values in seconds.items():
        cost[size] = median([value / one for value, one in zip(values, seconds[1], strict=True)]) or 0.0
    return cost


def _paired(speeds: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """Ratios of the rounds in which both succeeded."""
    return [a / b for a, b in zip(speeds, base, strict=True) if a and b]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value]


def _speeds(found: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """Arms and peers of one level of concurrency, each with its ratio to plain."""
    return {
        name: {"tok_per_s": median(_known(speeds)), "speedup": median(_paired(speeds, found["plain"]))}
        for name, speeds in found.items()
    }


def _length(found: Mapping[str, Sequence[dict[str, Any] | None]]) -> dict[str, Any]:
    plain = [one for one in found["plain"] if one]
    decode = {arm: [one["tok_per_s"] if one else None for one in rounds] for arm, rounds in found.items()}
    return {
        "tok_per_s": median([one["num_prompt_tokens"] / one["first_token_s"] for one in plain]),
        "ttft_s": median([one["first_token_s"] for one in plain]),
        "num_prompt_tokens": plain[0]["num_prompt_tokens"] if plain else None,
        "decode": _speeds(decode),
    }


def _peer(name: str, found: Mapping[str, Sequence[float | None]], results: Results) -> dict[str, Any]:
    """A peer's figures with ours of the same rounds, and how many times faster ours are."""

    def of(figure: str) -> Sequence[float | None]:
        return found.get(figure, [])

    concurrency, ratio = {}, {}
    for n, speeds in results.concurrency.items():
        if name in speeds:
            concurrency[n] = median(_known(speeds[name]))
            ratio[n] = {arm: median(_paired(speeds[arm], speeds[name])) for arm in ("plain", "auto") if arm in speeds}
    return {
        "plain_tok_per_s": median(_known(of("plain"))),
        "prefill_tok_per_s": median(_known(of("prefill"))),
        "concurrency": concurrency,
        "ours": {
            "plain_tok_per_s": median(_known(of("our_plain"))),
            "prefill_tok_per_s": median(_known(of("our_prefill"))),
            "drafts_tok_per_s": median(_known(of("our_drafts"))),
        },
        "ratio": {
            "plain": median(_paired(of("our_plain"), of("plain"))),
            "plain_spread": spread(_paired(of("our_plain"), of("plain"))),
            "prefill": median(_paired(of("our_prefill"), of("prefill"))),
            "drafts": median(_paired(of("our_drafts"), of("plain"))) if of("our_drafts") else None,
            "concurrency": ratio,
        },
    }


def terminal(found: Mapping[str, Any], notes: Sequence[str]) -> str:
    """All tables for the terminal, from the JSON object."""
    parts = [headline(found)]
    arms = list(found["arms"])
    if arms:
        rows = [_category(name, figures, arms) for name, figures in found["categories"].items()]
        rows.append(_category("all", found["arms"], arms))
        heads = [f"{arm} (length)" if arm != "plain" else "plain tok/s" for arm in arms]
        parts.append(columns(["answers, greedy", *heads, "at temperature 0.7"], rows))
    if not found["model"].get("lossless", True) and any("sampled" in one for one in found["arms"].values()):
        parts.append(_lossy_table(found))
    if found["concurrency"]:
        names = list(dict.fromkeys(name for speeds in found["concurrency"].values() for name in speeds))
        rows = [[n, *(_speed(speeds.get(name)) for name in names)] for n, speeds in found["concurrency"].items()]
        parts.append(columns(["requests at once, tok/s", *names], rows))
    if found["prefill"]:
        rows = [
            [n, number(p["tok_per_s"]), number(p["ttft_s"]), *(_speed(speed) for speed in p["decode"].values())]
            for n, p in found["prefill"].items()
        ]
        heads = [f"then {arm} tok/s" for arm in next(iter(found["prefill"].values()))["decode"]]
        parts.append(columns(["prompt of", "tok/s", "first token s", *heads], rows))
    if found["verify_cost"]:
        parts.append(
            columns(["verify", *found["verify_cost"]], [["cost", *map(number, found["verify_cost"].values())]])
        )
    slots = {arm: figures["acceptance_per_slot"] for arm, figures in found["arms"].items()}
    if any(slots.values()):
        most = max(map(len, slots.values()))
        rows = [[arm, *(f"{rate:.2f}" for rate in rates)] for arm, rates in slots.items() if rates]
        parts.append(columns(["accepted at slot", *map(str, range(1, most + 1))], rows))
    parts.append(
        f"start to first token {number(found['start_to_first_token_s'])} s, "
        f"peak memory {number(found['peak_rss_mb'])} MB"
    )
    for name, peer in found["peers"].items():
        parts.append(_peer_table(name, peer))
    parts += [f"note: {note}" for note in notes]
    return "\n\n".join(parts)


def headline(found: Mapping[str, Any]) -> str:
    """The mode that the figures hold for."""
    model, machine = found["model"], found["machine"]
    lines = [
        f"{model['model']}, {model['quantization']}",
        f"{model['device']} {model['dtype']}, ops {model['ops']}, {machine['threads']} threads, {machine['cpu']}",
        f"weights: {model.get('weights', 'as stored')}; keys and values: {model.get('kv_dtype', model['dtype'])}",
        f"chat template: {model['chat_template']}; thinking: {model['thinking']}; drafter: {model['drafter']}",
        f"{model['answers']}",
    ]
    return "\n".join(lines)


def _category(name: str, figures: Mapping[str, Any], arms: Sequence[str]) -> list[str]:
    cells = [name]
    for arm in arms:
        one = figures[arm]
        if arm == "plain":
            cells.append(number(one["tok_per_s"]) + _give_or_take(one["tok_per_s_spread"]))
        else:
            cells.append(f"{times(one['speedup'])} ({number(one['mean_acceptance_length'], 3)})")
    sampled = [(arm, figures[arm].get("sampled")) for arm in arms if arm not in ("plain", "synthetic")]
    cells.append(", ".join(f"{arm} {times(one['speedup'])}" for arm, one in sampled if one))
    return cells


def _lossy_table(found: Mapping[str, Any]) -> str:
    """What a lossy policy gives and takes, of the sampled answers: the greedy ones stay as they are."""
    model, rows = found["model"], []
    for arm, figures in found["arms"].items():
        if one := figures.get("sampled"):
            length, speedup = one["mean_acceptance_length"], times(one["speedup"])
            shares = [f"{one['inexact_share']:.1%}", f"{one['same_share']:.0%}"]
            rows.append([arm, number(one["tok_per_s"]), speedup, number(length, 3), *shares])
    title = f"NOT LOSSLESS, {model['policy']} from {model['typical_threshold']:g}, at 0.7"
    return columns([title, "tok/s", "speedup", "length", "tokens beyond exactness", "answers as plain"], rows)


def _peer_table(name: str, peer: Mapping[str, Any]) -> str:
    ratio, ours = peer["ratio"], peer["ours"]
    rows = [
        [
            "plain, fixed length",
            number(ours["plain_tok_per_s"]),
            number(peer["plain_tok_per_s"]),
            times(ratio["plain"]) + _give_or_take(ratio["plain_spread"]),
        ],
        [
            "with drafts, its plain",
            number(ours["drafts_tok_per_s"]),
            number(peer["plain_tok_per_s"]),
            times(ratio["drafts"]),
        ],
        [
            "prompt of 512",
            number(ours["prefill_tok_per_s"]),
            number(peer["prefill_tok_per_s"]),
            times(ratio["prefill"]),
        ],
    ]
    for n, speed in peer["concurrency"].items():
        told = ", ".join(f"{arm} {times(value)}" for arm, value in ratio["concurrency"][n].items())
        rows.append([f"{n} at once", "", number(speed), told])
    return columns(["tok/s", "lampejo", name, "ratio"], rows)


def _speed(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "-"
    return f"{number(one['tok_per_s'])} ({times(one['speedup'])})" if one["speedup"] != 1 else number(one["tok_per_s"])


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _give_or_take(value: float | None) -> str:
    return "" if value is None else f" ±{value:.0%}"
