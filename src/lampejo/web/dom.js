// Elements without HTML: text always arrives as text nodes, so nothing that a model writes can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

export const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);
export const find = (selector) => document.querySelector(selector);

// On a grid of 20, drawn with a round pen.
const ICONS = {
  menu: "M3 6h14M3 10h14M3 14h9",
  plus: "M10 4v12M4 10h12",
  sliders:
    "M3 6h8m4 0h2M3 14h2m4 0h8M13 4.2a1.8 1.8 0 1 0 0 3.6 1.8 1.8 0 0 0 0-3.6zM7 12.2a1.8 1.8 0 1 0 0 3.6 1.8 1.8 0 0 0 0-3.6z",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  copy: "M7.5 7.5h8v9h-8zM12.5 7.5v-4h-8v9h3",
  check: "M4 10.5l4 4 8-9",
  retry: "M15.5 8A6 6 0 1 0 16 11.5M16 4v4h-4",
  edit: "M4 16l1-4 8.5-8.5 3 3L8 15zM11.5 5.5l3 3",
  trash: "M4 6h12M8 6V4h4v2M5.5 6l.8 10.5h7.4L14.5 6M8.5 9v4.5M11.5 9v4.5",
  download: "M10 3v9M6 8.5l4 4 4-4M4 16.5h12",
  close: "M5 5l10 10M15 5L5 15",
  down: "M10 4v12M5 11l5 5 5-5",
  theme: "M10 2.75a7.25 7.25 0 1 0 0 14.5 7.25 7.25 0 0 0 0-14.5zM10 4.25v11.5a5.75 5.75 0 0 1 0-11.5z",
  keyboard: "M2.5 5.5h15v9h-15zM5.5 8.5h.01M8.5 8.5h.01M11.5 8.5h.01M14.5 8.5h.01M7 11.5h6",
  spark: "M10 2.5c.6 4.8 2.4 6.9 7.5 7.5-5.1.6-6.9 2.7-7.5 7.5-.6-4.8-2.4-6.9-7.5-7.5 5.1-.6 6.9-2.7 7.5-7.5z",
};

export function icon(name) {
  return draw(
    "svg",
    { class: `icon icon-${name}`, viewBox: "0 0 20 20", "aria-hidden": "true" },
    draw("path", { d: ICONS[name] }),
  );
}

// A button that shows a picture alone; its name is there for those who cannot see it, and as a hint.
export function iconButton(name, label, onclick, attributes = {}) {
  return make(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes },
    icon(name),
  );
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Only https and localhost have a clipboard; the old way works elsewhere.
    const area = make("textarea", { class: "offscreen", readonly: true });
    area.value = text;
    (document.querySelector("dialog:modal") ?? document.body).append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) return false;
  }
  return true;
}

// A copy button that says for a moment that it did.
export function copyButton(label, done, textOf) {
  const button = iconButton("copy", label, async () => {
    if (!(await copyText(textOf()))) return;
    button.replaceChildren(icon("check"));
    button.setAttribute("aria-label", done);
    button.classList.add("done");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
      button.classList.remove("done");
    }, 1600);
  });
  return button;
}
