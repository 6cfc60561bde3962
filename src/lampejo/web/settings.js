// The panel of settings: the system prompt of a conversation, and sampling for all of them.

import { FIELDS, isValid } from "./answer.js";
import { find, make } from "./dom.js";
import { t } from "./strings.js";

export class Settings {
  // app: {store, settings, chat}
  constructor(app) {
    this.app = app;
    find("#settings-form").addEventListener("submit", (event) => event.preventDefault());
    find("#system").addEventListener("input", (event) => {
      const { conversation } = app.chat;
      conversation.system = event.target.value;
      if (conversation.messages.length) app.store.save(conversation);
      this.put("system", event.target.value || undefined);
    });
    find("#thinking").addEventListener("change", (event) => this.put("thinking", event.target.value || undefined));
    find("#drafts").addEventListener("change", (event) => this.put("drafts", event.target.checked ? undefined : false));
    find("#reset").addEventListener("click", () => {
      for (const name of [...FIELDS.map((field) => field.name), "thinking", "drafts"]) delete app.settings[name];
      app.store.saveSettings(app.settings);
      this.render();
    });
  }

  put(name, value) {
    if (value === undefined) delete this.app.settings[name];
    else this.app.settings[name] = value;
    this.app.store.saveSettings(this.app.settings);
  }

  render() {
    const { settings, chat } = this.app;
    find("#system").value = chat.conversation.system;
    find("#thinking").value = ["on", "off"].includes(settings.thinking) ? settings.thinking : "";
    find("#drafts").checked = settings.drafts !== false;
    find("#fields").replaceChildren(...FIELDS.map((field) => this.fieldNode(field)));
  }

  fieldNode(field) {
    const { settings } = this.app;
    const id = `field-${field.name}`;
    const input = make("input", {
      id,
      type: "number",
      inputmode: field.step === 1 ? "numeric" : "decimal",
      min: field.low,
      max: field.high,
      step: field.step === 1 ? 1 : "any",
      placeholder: t("auto"),
      "aria-describedby": `${id}-hint`,
    });
    const hint = make("p", { id: `${id}-hint`, class: "hint", role: "alert" });
    if (isValid(field, settings[field.name])) input.value = settings[field.name];
    input.addEventListener("input", () => {
      const isEmpty = input.value === "" && !input.validity.badInput;
      const value = input.valueAsNumber;
      const isGood = isEmpty || isValid(field, value);
      input.setAttribute("aria-invalid", String(!isGood));
      const needsWhole = field.step === 1 && Number.isFinite(value) && !Number.isInteger(value);
      hint.textContent = isGood ? "" : needsWhole ? t("whole") : t("between", field.low, field.high);
      this.put(field.name, isEmpty || !isGood ? undefined : value);
    });
    return make("div", { class: "field" }, make("label", { for: id }, t(field.label)), input, hint);
  }
}
