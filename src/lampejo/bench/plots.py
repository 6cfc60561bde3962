"""Plots as SVG text: bars in groups, and lines. Colours are the page's own variables, for light and dark."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 58  # around the drawing
NUM_COLORS = 6
COLORS = {"plain": 0, "free": 0, "dflash": 1, "cost": 1, "lampejo": 1, "ngram": 2, "auto": 3, "synthetic": 4}  # else 5

Series = Mapping[str, Sequence[float | None]]  # name -> one value per label


def bars(title: str, unit: str, labels: Sequence[str], series: Series, mark: float | None = None) -> str:
    """Groups of bars, one group per label; ``mark`` draws a line across, such as "as fast as plain"."""
    top, ticks = _scale(series, mark)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    thick = min(36.0, step * 0.8 / max(1, len(series)))
    parts = []
    for i, (name, values) in enumerate(series.items()):
        for j, value in enumerate(values):
            if value is None:
                continue
            x = LEFT + step * (j + 0.5) + thick * (i - len(series) / 2)
            told = escape(f"{labels[j]}, {name}: {value:.3g} {unit}")
            y = _y(value, top)
            parts.append(
                f'<rect class="c{_color(name)}" x="{x:.1f}" y="{y:.1f}" width="{thick - 2:.1f}" '
                f'height="{_y(0, top) - y:.1f}"><title>{told}</title></rect>'
            )
    places = [LEFT + step * (j + 0.5) for j in range(len(labels))]
    return _plot(title, unit, parts, (labels, places), (top, ticks, mark), list(series))


def lines(title: str, unit: str, xs: Sequence[float], series: Series) -> str:
    """Lines over the numbers ``xs``."""
    top, ticks = _scale(series, None)
    low, high = min(xs), max(xs)
    places = [LEFT + 12 + (x - low) / (high - low or 1) * (WIDTH - LEFT - RIGHT - 24) for x in xs]
    parts = []
    for name, values in series.items():
        points = [(x, _y(v, top), v, at) for x, v, at in zip(places, values, xs, strict=True) if v is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        parts.append(f'<polyline class="s{_color(name)}" points="{path}"/>')
        parts += [
            f'<circle class="c{_color(name)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
            f"<title>{escape(f'{at:g}, {name}: {v:.3g} {unit}')}</title></circle>"
            for x, y, v, at in points
        ]
    return _plot(title, unit, parts, ([f"{x:g}" for x in xs], places), (top, ticks, None), list(series))


def _plot(
    title: str,
    unit: str,
    parts: Sequence[str],
    labels: tuple[Sequence[str], Sequence[float]],
    scale: tuple[float, Sequence[float], float | None],
    names: Sequence[str],
) -> str:
    top, ticks, mark = scale
    frame = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(tick, top):.1f}" y2="{_y(tick, top):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{_y(tick, top) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
    ]
    if mark is not None:
        frame.append(
            f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(mark, top):.1f}" y2="{_y(mark, top):.1f}"/>'
        )
    for label, x in zip(*labels, strict=True):
        frame.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(label)}</text>')
    legend, x = [], float(LEFT)
    for name in names:
        legend.append(
            f'<rect class="c{_color(name)}" x="{x:.0f}" y="{HEIGHT - 22}" width="12" height="12"/>'
            f'<text x="{x + 17:.0f}" y="{HEIGHT - 12}">{escape(name)}</text>'
        )
        x += 34 + 7.2 * len(name)
    return (
        f"<figure><figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join([*frame, *parts, *legend])}</svg></figure>"
    )


def _color(name: str) -> int:
    return COLORS.get(name, NUM_COLORS - 1)


def _scale(series: Series, mark: float | None) -> tuple[float, list[float]]:
    """The end of the axis, and its ticks: 1, 2 or 5 times a power of ten apart, at most six of them."""
    most = max([v for values in series.values() for v in values if v is not None] + [mark or 0.0])
    if not most > 0:
        return 1.0, [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 5))
    step = next(power * f for f in (1, 2, 5, 10) if most / (power * f) <= 5)
    num = math.ceil(most / step - 1e-9)
    return num * step, [round(i * step, 10) for i in range(num + 1)]


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)
