// Puts the page together: language, theme, the list of conversations, dialogs and keys.

import { Chat } from "./chat.js";
import { find, icon, iconButton, make } from "./dom.js";
import { apiKey, modelCard } from "./server.js";
import { Settings } from "./settings.js";
import { Speculation } from "./speculation.js";
import { Store } from "./store.js";
import { getLanguage, setLanguage, t, translate } from "./strings.js";

const NARROW = matchMedia("(max-width: 62rem)"); // both sides are drawers then; style.css has the same number
const IS_MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const NOTICES = { full: "storageFull", damaged: "storageDamaged", strange: "notImported" };

const notices = new Set(); // problems with what is kept, until they are dismissed
const store = new Store(notify);
const app = {
  store,
  settings: store.settings(),
  model: null,
  announce,
  changed: renderList,
  opened: () => settings.render(),
  askKey,
};

function announce(text) {
  find("#status").textContent = text;
}

// --- notices and the toast

function notify(problem) {
  notices.add(problem);
  renderNotices();
}

function renderNotices() {
  find("#notices").replaceChildren(
    ...[...notices].map((problem) => {
      const dismiss = iconButton("close", t("dismiss"), () => {
        notices.delete(problem);
        renderNotices();
      });
      return make("div", { class: "notice", role: "alert" }, make("p", {}, t(NOTICES[problem])), dismiss);
    }),
  );
}

let toastTimer = 0;

function toast(text, undo) {
  const close = () => find("#toast").replaceChildren();
  const button = make("button", { type: "button", class: "text-button", onclick: () => (close(), undo()) }, t("undo"));
  find("#toast").replaceChildren(make("p", {}, text), button);
  clearTimeout(toastTimer);
  toastTimer = setTimeout(close, 8000);
}

// --- conversations

function renderList() {
  const conversations = store.list();
  const items = conversations.map((conversation) => {
    const title = conversation.title || t("untitled");
    const isCurrent = conversation.id === app.chat.conversation.id;
    const open = make("button", { type: "button", class: "open", "aria-current": isCurrent && "true" }, title);
    open.addEventListener("click", () => {
      showView("chat");
      app.chat.open(conversation);
      closeDrawer("menu");
    });
    const isRunning = app.chat.running.has(conversation.id);
    return make(
      "li",
      { class: isRunning ? "running" : null },
      open,
      iconButton("download", t("exportOne", title), () => download([conversation])),
      iconButton("trash", t("deleteOne", title), () => remove([conversation])),
    );
  });
  const list = find("#conversation-list");
  const focused = [...list.querySelectorAll("button")].indexOf(document.activeElement);
  list.replaceChildren(...items);
  list.querySelectorAll("button")[focused]?.focus(); // answers end while somebody walks through the list
  find("#no-conversations").hidden = items.length > 0;
  for (const name of ["#export-all", "#delete-all"]) find(name).hidden = items.length === 0;
  const { title } = app.chat.conversation;
  document.title = title ? `${title} · lampejo` : "lampejo";
}

function remove(conversations) {
  for (const { id } of conversations) {
    app.chat.stop(id);
    store.remove(id);
  }
  if (!store.conversations.has(app.chat.conversation.id)) app.chat.start();
  renderList();
  if (document.activeElement === document.body) find("#new-chat").focus();
  toast(t(conversations.length === 1 ? "deleted" : "deletedAll"), () => {
    for (const conversation of conversations) store.save(conversation);
    app.chat.open(conversations[0]);
  });
}

function download(conversations) {
  const text = JSON.stringify({ format: "lampejo conversations", version: 1, conversations }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: url, download: `lampejo-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function upload(file) {
  try {
    app.chat.open(store.load(await file.text())[0] ?? app.chat.conversation);
  } catch {
    notify("strange");
  }
}

// --- views, drawers and dialogs

function showView(name) {
  for (const tab of document.querySelectorAll("[data-view]")) {
    const isOn = tab.dataset.view === name;
    tab.setAttribute("aria-selected", String(isOn));
    tab.tabIndex = isOn ? 0 : -1;
    find(`#${tab.dataset.view}`).hidden = !isOn;
  }
  if (location.hash !== (name === "chat" ? "" : `#${name}`))
    history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
  if (name === "chat") app.chat.render();
  else speculation.show();
}

const currentView = () => (find("#chat").hidden ? "speculation" : "chat");

// On a wide window the sides stand beside the text; on a narrow one they lie over it, as modal dialogs.
function openDrawer(name) {
  const drawer = find(`#${name}`);
  if (drawer.open) drawer.close();
  if (NARROW.matches) drawer.showModal();
  else drawer.setAttribute("open", "");
  if (name === "settings") find("#settings-button").setAttribute("aria-expanded", "true");
}

function closeDrawer(name) {
  const drawer = find(`#${name}`);
  if (name === "menu" && !NARROW.matches) return;
  drawer.close();
}

function toggleSettings() {
  const isOpen = find("#settings").open;
  if (isOpen) closeDrawer("settings");
  else openDrawer("settings");
  if (!isOpen && !NARROW.matches) find("#system").focus(); // a phone would cover half of it with keys
  if (!NARROW.matches) store.put("panel", isOpen ? "closed" : "open");
}

function arrange() {
  find("#menu").close();
  find("#settings").close();
  if (NARROW.matches) return;
  openDrawer("menu");
  if (store.get("panel") === "open") openDrawer("settings");
}

// Resolves to true once there is a key to try with.
let asking = null;

function askKey() {
  asking ??= new Promise((resolve) => {
    const dialog = find("#key");
    find("#key-wrong").hidden = !apiKey.get();
    find("#key-value").value = "";
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        const value = find("#key-value").value.trim();
        const isGiven = dialog.returnValue === "given" && value !== "";
        if (isGiven) apiKey.set(value);
        find("#key-value").value = "";
        resolve(isGiven);
        if (isGiven && !app.model) loadModel(false);
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}

async function loadModel(mayAsk = true) {
  try {
    const card = await modelCard();
    app.model = card?.id ?? null;
    find("#model").replaceChildren(app.model ?? "", make("span", {}, card?.lampejo?.mode ?? ""));
  } catch (error) {
    if (error.status === 401 && mayAsk) askKey();
    // Anything else shows when something is asked.
  }
}

// --- language, theme, keys

const SHORTCUTS = [
  ["keySend", "Enter"],
  ["keyLine", "Shift+Enter"],
  ["keyStop", "Esc"],
  ["keyEdit", "↑"],
  ["keyRetry", "Mod+Shift+Enter", () => currentView() === "chat" && app.chat.retry()],
  ["keyNew", "Mod+Shift+O", () => (showView("chat"), app.chat.start())],
  ["keyView", "Mod+Shift+V", () => showView(currentView() === "chat" ? "speculation" : "chat")],
  ["keySettings", "Mod+,", toggleSettings],
  ["keyList", "Mod+/", () => find("#shortcuts").showModal()],
];

function onKey(event) {
  if (event.key === "Escape" && !event.isComposing) {
    if (document.querySelector("dialog:modal")) return; // it closes by itself
    if (app.chat.endEdit()) return;
    if (currentView() === "chat") app.chat.stop();
    else speculation.stop();
    return;
  }
  if (!(IS_MAC ? event.metaKey : event.ctrlKey) || event.altKey || document.querySelector("dialog:modal")) return;
  const pressed = [
    "Mod",
    event.shiftKey && event.key !== "/" && "Shift",
    event.key.length === 1 ? event.key.toUpperCase() : event.key,
  ]
    .filter(Boolean)
    .join("+");
  const found = SHORTCUTS.find(([, keys, action]) => action && keys === pressed);
  if (!found) return;
  event.preventDefault();
  found[2]();
}

function renderShortcuts() {
  const rows = SHORTCUTS.flatMap(([name, keys]) => {
    const parts = keys.split("+").map((key) => make("kbd", {}, key.replace("Mod", IS_MAC ? "⌘" : "Ctrl")));
    return [make("dt", {}, t(name)), make("dd", {}, ...parts)];
  });
  find("#shortcut-list").replaceChildren(...rows);
}

function speak(wanted) {
  const oldPrompt = t("promptDefault");
  setLanguage(wanted);
  translate(document);
  for (const button of document.querySelectorAll("[data-language]"))
    button.setAttribute("aria-pressed", String(button.dataset.language === getLanguage()));
  if (speculation.prompt.value === oldPrompt) speculation.prompt.value = t("promptDefault");
  app.chat.nodes.clear();
  app.chat.render();
  speculation.render();
  settings.render();
  renderList();
  renderNotices();
  renderShortcuts();
}

function switchTheme() {
  const isSystemDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const shown = document.documentElement.dataset.theme ?? (isSystemDark ? "dark" : "light");
  const wanted = shown === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = wanted;
  store.put("theme", wanted);
}

setLanguage(store.get("language") ?? navigator.language.slice(0, 2));
for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
app.chat = new Chat(app);
const speculation = new Speculation(app);
const settings = new Settings(app);
const last = store.conversations.get(store.get("current"));
if (last) app.chat.conversation = last;
speak(getLanguage());
arrange();
showView(location.hash === "#speculation" ? "speculation" : "chat");

NARROW.addEventListener("change", arrange);
addEventListener("hashchange", () => showView(location.hash === "#speculation" ? "speculation" : "chat"));
document.addEventListener("keydown", onKey);
addEventListener("pagehide", () => {
  store.put("current", app.chat.conversation.id);
  for (const id of app.chat.running.keys()) if (store.conversations.has(id)) store.save(store.conversations.get(id));
});
addEventListener("storage", (event) => {
  if (!store.isChat(event.key)) return;
  const id = event.key.slice(event.key.lastIndexOf(".") + 1);
  if (app.chat.running.has(id)) return; // what is written here is newer
  store.read(event.key);
  if (id === app.chat.conversation.id && store.conversations.has(id)) app.chat.open(store.conversations.get(id));
  else if (id === app.chat.conversation.id) app.chat.start(); // deleted there
  renderList();
});

const onClick = (selector, action) => find(selector).addEventListener("click", action);
onClick("#menu-button", () => openDrawer("menu"));
onClick("#settings-button", toggleSettings);
onClick("#new-chat", () => {
  showView("chat");
  closeDrawer("menu");
  app.chat.start();
});
onClick("#import", () => find("#import-file").click());
find("#import-file").addEventListener("change", (event) => {
  if (event.target.files.length) upload(event.target.files[0]);
  event.target.value = "";
});
onClick("#export-all", () => download(store.list()));
onClick("#delete-all", () => remove(store.list()));
onClick("#theme", switchTheme);
onClick("#shortcuts-button", () => find("#shortcuts").showModal());
for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () =>
    button.dataset.close === "settings" ? toggleSettings() : find(`#${button.dataset.close}`).close(),
  );
}
for (const button of document.querySelectorAll("[data-language]")) {
  button.addEventListener("click", () => {
    store.put("language", button.dataset.language);
    speak(button.dataset.language);
  });
}
for (const tab of document.querySelectorAll("[data-view]")) {
  tab.addEventListener("click", () => showView(tab.dataset.view));
  tab.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    showView(tab.dataset.view === "chat" ? "speculation" : "chat");
    document.querySelector("[data-view][aria-selected=true]").focus();
  });
}
find("#settings").addEventListener("close", () => find("#settings-button").setAttribute("aria-expanded", "false"));
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog && dialog.matches(":modal")) dialog.close(); // the backdrop counts as the dialog
  });
}
find("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  find("#key").close("given");
});

if (!NARROW.matches) find("#message").focus();
loadModel();
