// Pictures of speculation: tokens by who proposed them, steps as bars, the survival of drafts.

import { draw, make } from "./dom.js";
import { number, percent, t } from "./strings.js";

const ORIGINS = ["target", "dflash", "ngram"];
const originOf = (token) => (ORIGINS.includes(token.origin) ? token.origin : "target");

// The text of an answer, token by token, in the steps that brought it.
export class Trace {
  constructor(root) {
    this.root = root;
    this.steps = [];
    this.counts = [];
    this.decoder = new TextDecoder();
  }

  // A character may be spread over tokens: their bytes are put together, and the last of them shows it.
  textOf({ text, bytes }) {
    return this.decoder.decode(bytes ? new Uint8Array(bytes) : new TextEncoder().encode(text), { stream: true });
  }

  show(steps) {
    for (let i = Math.max(0, this.steps.length - 1); i < steps.length; i++) {
      if (i === this.steps.length) {
        this.steps.push(make("span", { class: "step" }));
        this.counts.push(0);
        this.root.append(this.steps[i]);
      }
      for (const token of steps[i].slice(this.counts[i])) {
        this.steps[i].append(make("span", { class: `token ${originOf(token)}` }, this.textOf(token)));
      }
      this.counts[i] = steps[i].length;
      this.steps[i].title = t("stepTitle", i + 1, steps[i].length);
    }
  }

  // From this token on the text is another than the one beside it.
  mark(index) {
    const token = this.root.querySelectorAll(".token")[index];
    token?.scrollIntoView({ block: "nearest" });
    if (token) token.classList.add("differs");
    else this.root.append(make("span", { class: "token differs" }, "∎"));
  }
}

const LEFT = 34; // room for the numbers of an axis
const PITCH = 8; // from bar to bar

const label = (x, y, text, anchor = "middle") => draw("text", { x, y, "text-anchor": anchor, class: "axis" }, text);
const rule = (y, width) => draw("line", { x1: LEFT, x2: width, y1: y, y2: y, class: "grid" });

// The last steps, each as high as the tokens it brought, the drafted ones below the model's own.
export function bars(steps, width) {
  const height = 150;
  const bottom = height - 8;
  const shown = steps.slice(-Math.floor((width - LEFT) / PITCH));
  const highest = Math.max(4, ...shown.map((step) => step.length));
  const unit = (bottom - 12) / highest;
  const nodes = [];
  for (const value of [0, Math.ceil(highest / 2), highest])
    nodes.push(rule(bottom - value * unit, width), label(LEFT - 8, bottom - value * unit + 4, number(value), "end"));
  shown.forEach((step, i) => {
    let y = bottom;
    for (const origin of ["dflash", "ngram", "target"]) {
      const count = step.filter((token) => originOf(token) === origin).length;
      if (!count) continue;
      y -= count * unit;
      nodes.push(
        draw("rect", {
          x: LEFT + i * PITCH + 1,
          y: y + 0.75,
          width: PITCH - 2,
          height: Math.max(1, count * unit - 1.5),
          rx: 1.5,
          class: `bar ${origin}`,
        }),
      );
    }
  });
  const numTokens = steps.reduce((sum, step) => sum + step.length, 0);
  return draw(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": t("blocksLabel", steps.length, numTokens) },
    ...nodes,
  );
}

// histogram: entry j counts the steps that accepted j drafts. Entry k of the result: the share that accepted k or more.
export function survival(histogram) {
  const steps = histogram.reduce((sum, count) => sum + count, 0);
  let left = steps;
  return histogram.map((count) => {
    const share = steps ? left / steps : 0;
    left -= count;
    return share;
  });
}

export function survivalCurve(histogram, width) {
  const height = 190;
  const bottom = height - 38;
  const shares = survival(histogram);
  if (shares.length < 2) shares.push(0);
  const x = (k) => LEFT + 10 + (k * (width - LEFT - 24)) / (shares.length - 1);
  const y = (share) => bottom - share * (bottom - 14);
  const points = shares.map((share, k) => `${x(k)},${y(share)}`);
  const every = Math.ceil(shares.length / 12);
  const said = shares
    .map((share, k) => `${k}: ${percent(share)}`)
    .slice(1)
    .join(", ");
  return draw(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": t("survivalLabel", said) },
    ...[0, 0.5, 1].flatMap((share) => [rule(y(share), width), label(LEFT - 8, y(share) + 4, percent(share), "end")]),
    draw("polygon", {
      points: [`${x(0)},${bottom}`, ...points, `${x(shares.length - 1)},${bottom}`].join(" "),
      class: "area",
    }),
    draw("polyline", { points: points.join(" "), class: "curve" }),
    ...shares.map((share, k) =>
      draw("circle", { cx: x(k), cy: y(share), r: 3.5, class: "dot" }, draw("title", {}, `${k}: ${percent(share)}`)),
    ),
    ...shares.map((_, k) => (k % every ? null : label(x(k), bottom + 16, number(k)))),
    label((LEFT + width) / 2, height - 4, t("survivalAxis")),
  );
}
