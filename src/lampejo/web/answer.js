// What is asked of the server, and what came of it.

// The sampling fields of the settings; a field that is empty is not sent.
export const FIELDS = [
  { name: "temperature", label: "temperature", low: 0, high: 2, step: 0.1 },
  { name: "top_p", label: "topP", low: 0.01, high: 1, step: 0.05 },
  { name: "top_k", label: "topK", low: 0, high: null, step: 1 },
  { name: "min_p", label: "minP", low: 0, high: 1, step: 0.05 },
  { name: "max_tokens", label: "maxTokens", low: 1, high: null, step: 1 },
  { name: "seed", label: "seed", low: 0, high: null, step: 1 },
];

export function isValid(field, value) {
  if (!Number.isFinite(value) || value < field.low || (field.high !== null && value > field.high)) return false;
  return field.step !== 1 || Number.isSafeInteger(value);
}

// messages: of a conversation. Two of the same role in a row, left by answers that failed, become one: many chat
// templates take turns only.
export function requestBody(model, system, messages, settings) {
  const turns = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { role, content } of messages) {
    if (role === "assistant" && !content) continue;
    if (turns.at(-1)?.role === role) turns.at(-1).content += "\n\n" + content;
    else turns.push({ role, content });
  }
  const body = { messages: turns, lampejo: { trace: false, drafts: settings.drafts !== false } };
  if (model) body.model = model;
  for (const field of FIELDS) if (isValid(field, settings[field.name])) body[field.name] = settings[field.name];
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  return body;
}

// Folds the chunks of a stream. steps: [[{id, text, origin}]], filled if the server was asked for a trace.
export class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.steps = [];
    this.numTraced = 0;
    this.numFirst = 0; // tokens of the first chunk: they came at once, and tell nothing of the speed
    this.finish = null;
    this.usage = null;
    this.speculation = null;
    this.firstAt = null;
    this.lastAt = null;
    this.lastStep = null;
  }

  add(chunk) {
    const now = performance.now();
    const choice = chunk.choices?.[0];
    const text = (choice?.delta?.content ?? "") + (choice?.delta?.reasoning_content ?? "");
    const tokens = chunk.lampejo?.tokens ?? [];
    this.content += choice?.delta?.content ?? "";
    this.reasoning += choice?.delta?.reasoning_content ?? "";
    this.finish = choice?.finish_reason ?? this.finish;
    this.usage = chunk.usage ?? this.usage;
    this.speculation = chunk.metrics?.speculative_decoding ?? this.speculation;
    if (text || tokens.length) {
      if (this.firstAt === null) {
        this.firstAt = now;
        this.numFirst = tokens.length || 1;
      }
      this.lastAt = now;
    }
    if (tokens.length) {
      if (chunk.lampejo.step === undefined || chunk.lampejo.step !== this.lastStep) this.steps.push([]);
      this.lastStep = chunk.lampejo.step;
      this.steps.at(-1).push(...tokens);
      this.numTraced += tokens.length;
    }
  }

  get tokens() {
    return this.steps.flat();
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? this.numTraced;
  }

  // Of decoding alone, null while there is nothing to divide: what came in one go had no time of its own.
  get perSecond() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const count = this.numTokens - this.numFirst;
    return seconds > 0.02 && count > 0 ? count / seconds : null;
  }

  // What a conversation keeps of it.
  get stats() {
    const stats = { tokens: this.numTokens };
    if (this.perSecond !== null) stats.perSecond = this.perSecond;
    const length = this.speculation?.mean_acceptance_length;
    if (Number.isFinite(length)) stats.acceptance = length;
    return stats;
  }
}
