// What the browser keeps: conversations, one entry each so that a damaged one costs no other, and settings.
//
// conversation: {id, title, updated, system, messages: [{role, content, reasoning, stats, end}]}
// stats: {tokens, perSecond, acceptance}; end: "stopped" or "length" when the answer did not end by itself

const CHAT = "lampejo.chat.";
const BROKEN = "lampejo.broken.";
const SETTINGS = "lampejo.settings";

const isText = (value) => typeof value === "string";

function checkedMessage(message) {
  if (!["user", "assistant"].includes(message?.role) || !isText(message.content)) return null;
  const kept = { role: message.role, content: message.content };
  if (isText(message.reasoning) && message.reasoning) kept.reasoning = message.reasoning;
  if (["stopped", "length"].includes(message.end)) kept.end = message.end;
  const stats = message.stats;
  if (stats && Number.isFinite(stats.tokens)) {
    kept.stats = { tokens: stats.tokens };
    for (const name of ["perSecond", "acceptance"]) if (Number.isFinite(stats[name])) kept.stats[name] = stats[name];
  }
  // The page was closed before its end.
  if (kept.role === "assistant" && !kept.stats && !kept.end) kept.end = "stopped";
  return kept;
}

function checkedConversation(value, id) {
  if (!value || !Array.isArray(value.messages)) throw new Error("not a conversation");
  const all = value.messages.map(checkedMessage);
  if (all.includes(null)) throw new Error("not a message");
  const messages = all.filter((message) => message.role === "user" || message.content || message.reasoning);
  return {
    id,
    title: isText(value.title) ? value.title : "",
    updated: Number.isFinite(value.updated) ? value.updated : 0,
    system: isText(value.system) ? value.system : "",
    messages,
  };
}

export class Store {
  // tell(problem): "full" when nothing more fits, "damaged" when something could not be read
  constructor(tell) {
    this.tell = tell;
    this.conversations = new Map();
    try {
      this.storage = window.localStorage;
      for (const key of Object.keys(this.storage)) if (key.startsWith(CHAT)) this.read(key);
    } catch {
      this.storage = null; // forbidden: everything lives until the page is closed
    }
  }

  // Also after another tab has written.
  read(key) {
    const id = key.slice(CHAT.length);
    const text = this.storage.getItem(key);
    if (text === null) return this.conversations.delete(id);
    try {
      this.conversations.set(id, checkedConversation(JSON.parse(text), id));
    } catch {
      // Set aside, not thrown away: somebody may still want to look at it.
      this.conversations.delete(id);
      this.write(BROKEN + id, text);
      this.storage.removeItem(key);
      this.tell("damaged");
    }
  }

  isChat(key) {
    return this.storage !== null && !!key?.startsWith(CHAT);
  }

  // What the page has exported, here or in another browser. Throws if it is anything else.
  load(text) {
    const { conversations } = JSON.parse(text);
    const checked = conversations.map((value) => checkedConversation(value, newId()));
    for (const conversation of checked) this.save(conversation);
    return checked;
  }

  list() {
    return [...this.conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  save(conversation) {
    this.conversations.set(conversation.id, conversation);
    return this.write(CHAT + conversation.id, JSON.stringify(conversation));
  }

  remove(id) {
    this.conversations.delete(id);
    try {
      this.storage?.removeItem(CHAT + id);
    } catch {
      // Nothing was kept.
    }
  }

  settings() {
    try {
      const value = JSON.parse(this.storage?.getItem(SETTINGS) ?? "{}");
      return value && typeof value === "object" && !Array.isArray(value) ? value : {};
    } catch {
      return {};
    }
  }

  saveSettings(settings) {
    this.write(SETTINGS, JSON.stringify(settings));
  }

  get(name) {
    try {
      return this.storage?.getItem(`lampejo.${name}`) ?? null;
    } catch {
      return null;
    }
  }

  put(name, text) {
    this.write(`lampejo.${name}`, text);
  }

  write(key, text) {
    try {
      this.storage?.setItem(key, text);
      return true;
    } catch {
      this.tell("full");
      return false;
    }
  }
}

function newId() {
  const random = crypto.getRandomValues(new Uint32Array(2)); // randomUUID is there on https and localhost only
  return [...random].map((part) => part.toString(36)).join("");
}

export function newConversation(system) {
  return { id: newId(), title: "", updated: Date.now(), system, messages: [] };
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0].trim();
  const chars = [...line];
  return chars.length > 60 ? chars.slice(0, 59).join("").trimEnd() + "…" : line;
}
