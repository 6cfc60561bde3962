// The view of conversations.

import { Answer, requestBody } from "./answer.js";
import { copyButton, find, icon, iconButton, make } from "./dom.js";
import { Markdown } from "./markdown.js";
import { chat, ServerError } from "./server.js";
import { newConversation, titleOf } from "./store.js";
import { t } from "./strings.js";

const SAVE_MS = 1500; // how often a growing answer is kept

const isTouch = () => matchMedia("(pointer: coarse)").matches; // no Shift there: Enter is for lines

// Puts nodes into a parent and leaves alone those that have their place already.
function place(parent, nodes) {
  nodes.forEach((node, i) => {
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
  });
  while (parent.children.length > nodes.length) parent.lastChild.remove();
}

export class Chat {
  // app: {store, settings, model, announce(text), changed(), opened(), askKey()}
  constructor(app) {
    this.app = app;
    this.running = new Map(); // conversation id to what stops its answer
    this.problems = new Map(); // conversation id to what went wrong last
    this.nodes = new Map(); // message to what shows it
    this.opened = new WeakSet(); // messages whose thoughts somebody reads
    this.follows = true; // the end of the text, until somebody scrolls up
    this.isEditing = false;
    this.scroll = find("#scroll");
    this.field = find("#message");
    this.conversation = newConversation(app.settings.system ?? "");

    find("#composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    find("#stop").addEventListener("click", () => this.stop());
    find("#edit-cancel").addEventListener("click", () => this.endEdit());
    find("#latest").addEventListener("click", () => this.toEnd());
    this.field.addEventListener("input", () => this.fit());
    this.field.addEventListener("keydown", (event) => this.key(event));
    this.scroll.addEventListener("scroll", () => {
      this.follows = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < 48;
      find("#latest").hidden = this.follows;
    });
  }

  get isRunning() {
    return this.running.has(this.conversation.id);
  }

  open(conversation) {
    this.endEdit();
    this.conversation = conversation;
    this.follows = true;
    this.nodes.clear();
    this.render();
    this.app.changed();
    this.app.opened();
  }

  start() {
    this.open(newConversation(this.app.settings.system ?? ""));
    this.field.focus();
  }

  key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey && !isTouch()) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !this.field.value && !this.isRunning) {
      if (this.edit()) event.preventDefault();
    }
  }

  send(text = this.field.value) {
    if (!text.trim() || this.isRunning) return;
    const { messages } = this.conversation;
    if (this.isEditing) messages.length = messages.findLastIndex((message) => message.role === "user");
    this.endEdit();
    this.field.value = "";
    this.fit();
    messages.push({ role: "user", content: text.trim() });
    if (messages.length === 1) this.conversation.title = titleOf(text);
    this.follows = true;
    this.answer(this.conversation);
  }

  retry() {
    const { messages } = this.conversation;
    if (this.isRunning || !messages.length) return;
    if (messages.at(-1).role === "assistant") messages.pop();
    this.follows = true;
    if (!isTouch()) this.field.focus(); // the button that was pressed goes away
    this.answer(this.conversation);
  }

  // The last message goes back to where it was written.
  edit() {
    const last = this.conversation.messages.findLast((message) => message.role === "user");
    if (!last || this.isRunning) return false;
    this.isEditing = true;
    find("#editing").hidden = false;
    this.field.value = last.content;
    this.fit();
    this.field.focus();
    return true;
  }

  endEdit() {
    if (!this.isEditing) return false;
    this.isEditing = false;
    find("#editing").hidden = true;
    this.field.value = "";
    this.fit();
    return true;
  }

  stop(id = this.conversation.id) {
    this.running.get(id)?.abort();
  }

  async answer(conversation) {
    const { app } = this;
    const body = requestBody(app.model, conversation.system, conversation.messages, app.settings);
    const control = new AbortController();
    const message = { role: "assistant", content: "" };
    const answer = new Answer();
    this.running.set(conversation.id, control);
    this.problems.delete(conversation.id);
    conversation.messages.push(message);
    this.keep(conversation);
    app.announce(t("answering"));
    let problem = null;
    let savedAt = performance.now();
    try {
      for await (const chunk of chat(body, control.signal)) {
        answer.add(chunk);
        message.content = answer.content;
        if (answer.reasoning) message.reasoning = answer.reasoning;
        this.grow(conversation, message);
        if (performance.now() - savedAt > SAVE_MS && app.store.conversations.has(conversation.id)) {
          app.store.save(conversation);
          savedAt = performance.now();
        }
      }
      message.stats = answer.stats;
      if (answer.finish === "length") message.end = "length";
    } catch (error) {
      if (control.signal.aborted) message.end = "stopped";
      else problem = error instanceof ServerError ? error : new ServerError(500, String(error));
    }
    this.running.delete(conversation.id);
    const isEmpty = !message.content && !message.reasoning;
    if (isEmpty && (problem || message.end === "stopped"))
      conversation.messages.splice(conversation.messages.indexOf(message), 1);
    if (!app.store.conversations.has(conversation.id)) return; // deleted meanwhile
    if (problem) this.problems.set(conversation.id, problem);
    this.keep(conversation);
    app.announce(problem ? "" : `${t(message.end === "stopped" ? "stopped" : "answered")} ${message.content}`);
    if (problem?.status === 401) this.askKey(conversation);
  }

  async askKey(conversation) {
    if (!(await this.app.askKey())) return;
    if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
    if (!this.running.has(conversation.id)) this.answer(conversation);
  }

  keep(conversation) {
    conversation.updated = Date.now();
    this.app.store.save(conversation);
    this.app.changed();
    if (conversation === this.conversation) this.render();
  }

  render() {
    const { conversation } = this;
    const { messages } = conversation;
    const problem = this.problems.get(conversation.id);
    const isRunning = this.isRunning;
    const lastUser = messages.findLastIndex((message) => message.role === "user");
    const nodes = messages.map((message, i) => this.messageNode(message, i === messages.length - 1, i === lastUser));
    if (problem) nodes.push(this.problemNode(problem));
    place(find("#messages"), nodes);
    find("#hello").hidden = messages.length > 0;
    find("#examples").replaceChildren(
      ...t("examples").map((text) =>
        make("li", {}, make("button", { type: "button", onclick: () => this.send(text) }, text)),
      ),
    );
    find("#chat-title").textContent = conversation.title || t("untitled");
    find("#send").hidden = isRunning;
    find("#stop").hidden = !isRunning;
    find("#latest").hidden = true;
    if (this.follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  // What shows a message stays as long as its conversation does, so that a selection in it does too; what may be done
  // with it changes.
  messageNode(message, isLast, isLastUser) {
    const isLive = isLast && this.isRunning && message.role === "assistant";
    const view = this.nodes.get(message) ?? this.newView(message);
    view.article.className = `message ${message.role}${isLast ? " last" : ""}${isLive ? " live" : ""}`;
    if (view.markdown) this.show(message, isLive);
    view.foot.replaceChildren();
    if (message.end) view.foot.append(make("p", { class: "end" }, t(message.end === "stopped" ? "stopped" : "cut")));
    if (!isLive) view.foot.append(this.actions(message, isLast, isLastUser));
    return view.article;
  }

  newView(message) {
    const isUser = message.role === "user";
    const view = {
      article: make("article", {}, make("h2", { class: "offscreen" }, t(isUser ? "you" : "model"))),
      foot: make("div", { class: "foot" }),
    };
    if (isUser) {
      view.article.append(make("div", { class: "text" }, message.content), view.foot);
    } else {
      view.markdown = new Markdown(make("div", { class: "text prose" }));
      view.thought = new Markdown(make("div", { class: "prose" }));
      view.label = make("span");
      view.fold = make("details", { class: "reasoning" }, make("summary", {}, view.label), view.thought.root);
      view.fold.open = this.opened.has(message);
      view.fold.addEventListener("toggle", () =>
        view.fold.open ? this.opened.add(message) : this.opened.delete(message),
      );
      view.article.append(view.fold, view.markdown.root, view.foot);
    }
    this.nodes.set(message, view);
    return view;
  }

  actions(message, isLast, isLastUser) {
    const bar = make("div", { class: "actions" });
    if (message.content) bar.append(copyButton(t("copy"), t("copied"), () => message.content));
    if (isLastUser && !this.isRunning) bar.append(iconButton("edit", t("edit"), () => this.edit()));
    if (isLast && !this.isRunning && !this.problems.has(this.conversation.id))
      bar.append(iconButton("retry", t("retry"), () => this.retry(), { class: "icon-button retry" }));
    if (message.stats) {
      const { tokens, perSecond, acceptance } = message.stats;
      const parts = [
        t("tokens", tokens),
        perSecond && t("tokensPerSecond", perSecond),
        acceptance && t("acceptanceShort", acceptance),
      ];
      bar.append(
        make(
          "span",
          { class: "quiet", title: acceptance ? t("acceptanceHint") : null },
          parts.filter(Boolean).join(" · "),
        ),
      );
    }
    return bar;
  }

  problemNode(problem) {
    const needsKey = problem.status === 401 || problem.status === 403;
    const button = needsKey
      ? make("button", { type: "button", class: "button", onclick: () => this.askKey(this.conversation) }, t("giveKey"))
      : make(
          "button",
          { type: "button", class: "button retry", onclick: () => this.retry() },
          icon("retry"),
          t("retry"),
        );
    return make(
      "div",
      { class: "problem", role: "alert" },
      make("p", {}, make("strong", {}, problem.message), " ", problem.remedy),
      button,
    );
  }

  // Shows more of an answer with the next frame; a frame takes everything that came until then.
  grow(conversation, message) {
    if (conversation !== this.conversation || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (conversation !== this.conversation || !this.nodes.has(message)) return;
      this.show(message, this.isRunning);
      if (this.follows) this.scroll.scrollTop = this.scroll.scrollHeight;
      else find("#latest").hidden = false;
    });
  }

  show(message, isLive) {
    const { markdown, thought, fold, label, article } = this.nodes.get(message);
    fold.hidden = !message.reasoning;
    label.textContent = t(isLive && !message.content ? "thinkingNow" : "thought");
    if (message.reasoning) thought.show(message.reasoning);
    markdown.show(message.content);
    article.classList.toggle("waiting", isLive && !message.content && !message.reasoning);
    if (!isLive && !message.content && !message.end)
      markdown.root.replaceChildren(make("p", { class: "quiet" }, t("noText")));
  }

  toEnd() {
    this.follows = true;
    this.scroll.scrollTop = this.scroll.scrollHeight;
    find("#latest").hidden = true;
  }

  // The field grows with its text, up to a third of the window.
  fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, innerHeight / 3)}px`;
  }
}
