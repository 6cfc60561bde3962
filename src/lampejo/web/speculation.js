// The view of speculation: one prompt, run with drafts, without, or both ways to see that the text is the same.

import { Answer, requestBody } from "./answer.js";
import { find, icon, make } from "./dom.js";
import { chat, ServerError } from "./server.js";
import { number, percent, speed, t } from "./strings.js";
import { bars, survivalCurve, Trace } from "./trace.js";

const MAX_TOKENS = 256; // if the settings name no number

export class Speculation {
  // app: {settings, model, announce(text), askKey()}
  constructor(app) {
    this.app = app;
    this.runs = []; // {drafts, answer, state: "waiting" | "running" | "done" | "failed"}
    this.control = null;
    this.problem = null;
    this.prompt = find("#trial-prompt");
    this.prompt.value = t("promptDefault");
    find("#trial").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start([find("#trial-drafts").checked]);
    });
    find("#trial-compare").addEventListener("click", () => {
      if (find("#trial").reportValidity()) this.start([true, false]);
    });
    find("#trial-stop").addEventListener("click", () => this.stop());
    addEventListener("resize", () => this.grow());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches)
        return;
      event.preventDefault();
      if (!this.control) find("#trial").requestSubmit();
    });
  }

  stop() {
    this.control?.abort();
  }

  // One after the other, so that neither slows the other down.
  async start(modes) {
    if (this.control) return;
    this.control = new AbortController();
    this.problem = null;
    this.runs = modes.map((drafts) => ({ drafts, answer: new Answer(), state: "waiting" }));
    const messages = [{ role: "user", content: this.prompt.value.trim() }];
    const settings = { max_tokens: MAX_TOKENS, ...this.app.settings, seed: find("#trial-seed").valueAsNumber };
    const body = requestBody(this.app.model, this.app.settings.system ?? "", messages, settings);
    this.app.announce(t("answering"));
    try {
      for (const run of this.runs) {
        run.state = "running";
        this.render();
        for await (const chunk of chat(
          { ...body, lampejo: { trace: true, drafts: run.drafts } },
          this.control.signal,
        )) {
          run.answer.add(chunk);
          this.grow();
        }
        run.state = "done";
      }
    } catch (error) {
      for (const run of this.runs) if (run.state !== "done") run.state = "failed";
      if (!this.control.signal.aborted)
        this.problem = error instanceof ServerError ? error : new ServerError(500, String(error));
    }
    this.control = null;
    this.render();
    this.app.announce(this.problem ? "" : t("answered"));
    if (this.problem?.status === 401 && (await this.app.askKey())) this.start(modes);
  }

  render() {
    const isRunning = this.control !== null;
    find("#trial-run").hidden = isRunning;
    find("#trial-compare").hidden = isRunning;
    find("#trial-stop").hidden = !isRunning;
    find("#trial-notice").replaceChildren(
      ...(this.problem
        ? [
            make(
              "div",
              { class: "problem", role: "alert" },
              make("p", {}, make("strong", {}, this.problem.message), " ", this.problem.remedy),
            ),
          ]
        : []),
    );
    for (const run of this.runs) run.trace = new Trace(make("div", { class: "trace", role: "group", tabindex: "0" }));
    const nodes = this.runs.map((run) => this.runNode(run));
    find("#runs").classList.toggle("pair", nodes.length === 2);
    find("#runs").replaceChildren(...(nodes.length ? nodes : [make("p", { class: "quiet empty" }, t("nothingYet"))]));
    this.show();
    this.judge();
  }

  runNode(run) {
    const name = t(run.drafts ? "withDrafts" : "withoutDrafts");
    run.trace.root.setAttribute("aria-label", name);
    run.tiles = make("dl", { class: "tiles" });
    run.note = make("p", { class: "quiet" });
    return make(
      "article",
      { class: "run", "aria-busy": String(run.state === "running") },
      make("h2", {}, name),
      run.tiles,
      run.note,
      run.trace.root,
    );
  }

  grow() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.show();
    });
  }

  show() {
    for (const run of this.runs) {
      const { answer } = run;
      const spoken = answer.speculation ?? {};
      const tile = (label, value) => make("div", {}, make("dt", {}, t(label)), make("dd", {}, value ?? "–"));
      const told = (value, write) => (Number.isFinite(value) ? write(value) : null);
      run.tiles.replaceChildren(
        tile("perSecond", told(answer.perSecond, speed)),
        tile("perStep", answer.steps.length ? number(answer.numTraced / answer.steps.length, 1) : null),
        tile(
          "acceptanceLength",
          told(spoken.mean_acceptance_length, (value) => number(value, 2)),
        ),
        tile("acceptanceRate", told(spoken.draft_acceptance_rate, percent)),
      );
      const { root } = run.trace;
      const follows = root.scrollHeight - root.scrollTop - root.clientHeight < 48; // until somebody scrolls up
      run.trace.show(answer.steps);
      if (follows && run.state === "running") root.scrollTop = root.scrollHeight;
      run.note.textContent =
        run.state === "waiting"
          ? t("waiting")
          : run.state === "done" && answer.content && !answer.numTraced
            ? t("notTraced")
            : "";
    }
    const drafted = this.runs.find((run) => run.drafts) ?? this.runs[0];
    const width = find("#blocks").clientWidth || 480; // one unit is one pixel, so that the numbers have their size
    find("#blocks").replaceChildren(bars(drafted?.answer.steps ?? [], width));
    const histogram = drafted?.answer.speculation?.acceptance_histogram ?? [];
    find("#survival").replaceChildren(
      histogram.length ? survivalCurve(histogram, width) : make("p", { class: "quiet empty" }, t("survivalEmpty")),
    );
  }

  // Says of two runs whether their texts are the same: every token, and every character.
  judge() {
    const verdict = find("#verdict");
    verdict.hidden = this.runs.length < 2 || this.control !== null;
    if (verdict.hidden) return;
    verdict.classList.remove("good", "bad");
    const say = (kind, title, ...texts) => {
      if (kind) verdict.classList.add(kind);
      const mark = kind ? icon(kind === "good" ? "check" : "close") : null;
      verdict.replaceChildren(
        ...[
          mark,
          make("p", {}, title && make("strong", {}, title), title && " ", texts.filter(Boolean).join(" ")),
        ].filter(Boolean),
      );
    };
    if (this.runs.some((run) => run.state !== "done")) return say(null, null, t("notCompared"));
    const [on, off] = this.runs.map((run) => run.answer);
    const [a, b] = [on.tokens, off.tokens];
    let same = 0;
    while (same < a.length && same < b.length && a[same].id === b[same].id) same++;
    const ratio = on.perSecond && off.perSecond ? on.perSecond / off.perSecond : null;
    if (same < a.length || same < b.length) {
      for (const run of this.runs) run.trace.mark(same);
      say("bad", t("differs"), t("differsMore", same + 1));
    } else if (on.content !== off.content || on.reasoning !== off.reasoning) {
      say("bad", t("differs"), t("differsText"));
    } else {
      say("good", t("identical"), t("identicalMore", on.numTokens), ratio && t("faster", ratio));
    }
  }
}
