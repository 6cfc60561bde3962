// Markdown as models write it, made into nodes: headings, lists, quotes, tables, code, emphasis, links. What is not
// understood stays text. While an answer grows, blocks that are complete keep their nodes.

import { copyButton, make } from "./dom.js";
import { t } from "./strings.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.+)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,6})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TABLE_RULE = /^\|?(?: *:?-+:? *\|)+(?: *:?-+:?)? *$/;

const isTable = (lines, i) => lines[i].includes("|") && i + 1 < lines.length && TABLE_RULE.test(lines[i + 1].trim());
const startsBlock = (lines, i) =>
  FENCE.test(lines[i]) ||
  HEADING.test(lines[i]) ||
  RULE.test(lines[i]) ||
  QUOTE.test(lines[i]) ||
  ITEM.test(lines[i]) ||
  isTable(lines, i);

// Lines to blocks: {kind, source, ...}; source is what the block was made of.
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    const start = i;
    const line = lines[i];
    let block;
    let match;
    if (!line.trim()) {
      i++;
      continue;
    } else if ((match = FENCE.exec(line))) {
      const [, fence, info] = match;
      const isEnd = (text) => text.startsWith(fence) && !text.replaceAll(fence[0], "");
      for (i++; i < lines.length && !isEnd(lines[i].trim());) i++;
      block = { kind: "code", info: info.trim(), text: lines.slice(start + 1, i).join("\n") };
      i++;
    } else if ((match = HEADING.exec(line))) {
      block = { kind: "heading", level: match[1].length, text: match[2].trim().replace(/ #+$/, "") };
      i++;
    } else if (RULE.test(line)) {
      block = { kind: "rule" };
      i++;
    } else if (QUOTE.test(line)) {
      while (i < lines.length && QUOTE.test(lines[i])) i++;
      block = { kind: "quote", lines: lines.slice(start, i).map((text) => text.replace(QUOTE, "")) };
    } else if (ITEM.test(line)) {
      block = listOf(lines, i);
      i = block.end;
    } else if (isTable(lines, i)) {
      for (i += 2; i < lines.length && lines[i].includes("|");) i++;
      block = {
        kind: "table",
        head: cellsOf(line),
        ends: cellsOf(lines[start + 1]),
        rows: lines.slice(start + 2, i).map(cellsOf),
      };
    } else {
      for (i++; i < lines.length && lines[i].trim() && !startsBlock(lines, i);) i++;
      block = { kind: "paragraph", text: lines.slice(start, i).join("\n") };
    }
    blocks.push({ ...block, source: lines.slice(start, i).join("\n") });
  }
  return blocks;
}

// A list goes on while lines are items of it, or stand further in than its bullets.
function listOf(lines, i) {
  const [, indent, bullet] = ITEM.exec(lines[i]);
  const isOrdered = /\d/.test(bullet);
  const items = [];
  let inside = 0;
  for (; i < lines.length; i++) {
    const match = ITEM.exec(lines[i]);
    if (match && match[1].length < indent.length + 2 && match[1].length >= indent.length - 1) {
      if (/\d/.test(match[2]) !== isOrdered || RULE.test(lines[i])) break;
      inside = Math.min(match[0].length, match[1].length + match[2].length + 1);
      items.push([lines[i].slice(match[0].length)]);
    } else if (!lines[i].trim()) {
      const next = lines.slice(i + 1, i + 3).find((text) => text.trim());
      if (next === undefined || !(/^ {2,}/.test(next) || ITEM.test(next))) break;
      items.at(-1).push("");
    } else {
      const found = lines[i].search(/\S/);
      if (found < 2 && (startsBlock(lines, i) || !lines[i - 1].trim())) break;
      items.at(-1).push(lines[i].slice(Math.min(found, inside)));
    }
  }
  return { kind: "list", isOrdered, start: isOrdered ? parseInt(bullet, 10) : 1, items, end: i };
}

function cellsOf(line) {
  const cells = line.trim().replaceAll("\\|", "\u0000").split("|");
  if (!cells[0].trim()) cells.shift();
  if (cells.length && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\u0000", "|"));
}

function nodeOf(block, depth) {
  switch (block.kind) {
    case "code":
      return codeNode(block);
    case "heading":
      // The page's own headings are h1 and h2; those of an answer come below them.
      return make(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text));
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, ...nodesOf(block.lines, depth + 1));
    case "list": {
      const items = block.items.map((lines) => make("li", {}, ...itemNodes(lines, depth + 1)));
      return make(block.isOrdered ? "ol" : "ul", block.start === 1 ? {} : { start: block.start }, ...items);
    }
    case "table":
      return tableNode(block);
    default:
      return make("p", {}, ...inline(block.text));
  }
}

function nodesOf(lines, depth) {
  if (depth > MAX_DEPTH) return [make("p", {}, lines.join("\n"))];
  return blocksOf(lines).map((block) => nodeOf(block, depth));
}

// An item of one paragraph, maybe with a list below it, stands close to its neighbours.
function itemNodes(lines, depth) {
  const nodes = nodesOf(lines, depth);
  return nodes[0]?.tagName === "P" && !lines.includes("") ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function codeNode({ info, text }) {
  const code = make("code", {}, text);
  const language = info.split(/[\s{]/)[0].slice(0, 30);
  return make(
    "figure",
    { class: "code" },
    make(
      "figcaption",
      {},
      make("span", {}, language || t("code")),
      copyButton(t("copyCode"), t("copied"), () => code.textContent),
    ),
    make("pre", { role: "group", tabindex: "0", "aria-label": t("code") }, code),
  );
}

function tableNode({ head, ends, rows }) {
  const classOf = (i) => {
    const end = ends[i] ?? "";
    return end.endsWith(":") ? (end.startsWith(":") ? "center" : "right") : null;
  };
  const row = (tag, cells) =>
    make("tr", {}, ...head.map((_, i) => make(tag, { class: classOf(i) }, ...inline(cells[i] ?? ""))));
  const table = make(
    "table",
    {},
    make("thead", {}, row("th", head)),
    make("tbody", {}, ...rows.map((cells) => row("td", cells))),
  );
  return make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": t("table") }, table);
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const isWord = (char) => char !== undefined && /[\p{L}\p{N}_]/u.test(char);
const isSpace = (char) => char === undefined || /\s/.test(char);

// Where emphasis that began before `from` ends, or -1.
function closing(text, mark, from) {
  for (let i = text.indexOf(mark, from); i !== -1; i = text.indexOf(mark, i + 1)) {
    const after = text[i + mark.length];
    if (isSpace(text[i - 1]) || text[i - 1] === "\\") continue;
    if (mark.length === 1 && (after === mark || text[i - 1] === mark)) continue;
    if (mark[0] === "_" && isWord(after)) continue;
    return i;
  }
  return -1;
}

// Only what leads to another page; "javascript:", "data:" and the like stay text.
function safeUrl(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const link = (href, ...children) =>
  make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);

function inline(text, depth = 0) {
  const nodes = [];
  const hopeless = new Set(); // marks with no end in what follows: looked for once, not at every place
  let plain = "";
  const add = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  for (let i = 0; i < text.length;) {
    const char = text[i];
    if (char === "\\" && /[\\`*_#|~]/.test(text[i + 1] ?? "")) {
      plain += text[i + 1];
      i += 2;
      continue;
    }
    if (char === "\n") {
      plain = plain.trimEnd();
      add(make("br"));
      i++;
      continue;
    }
    const found =
      depth < MAX_DEPTH && (codeAt(text, i, hopeless) || markAt(text, i, hopeless, depth) || linkAt(text, i, depth));
    if (found) {
      add(found.node);
      i = found.end;
    } else {
      plain += char;
      i++;
      if (char === "`") for (; text[i] === "`"; i++) plain += "`";
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function codeAt(text, i, hopeless) {
  if (text[i] !== "`") return null;
  let length = 1;
  while (text[i + length] === "`") length++;
  const mark = "`".repeat(length);
  if (hopeless.has(mark)) return null;
  for (let end = text.indexOf(mark, i + length); end !== -1; end = text.indexOf(mark, end)) {
    let past = end + length;
    while (text[past] === "`") past++;
    if (past === end + length) {
      let code = text.slice(i + length, end).replaceAll("\n", " ");
      if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
      return { node: make("code", {}, code), end: past };
    }
    end = past;
  }
  hopeless.add(mark);
  return null;
}

function markAt(text, i, hopeless, depth) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, i) || hopeless.has(mark)) continue;
    if (isSpace(text[i + mark.length]) || (mark[0] === "_" && isWord(text[i - 1]))) continue;
    if (mark.length === 1 && text[i + 1] === mark) continue;
    const end = closing(text, mark, i + mark.length + 1);
    if (end !== -1) {
      return { node: make(tag, {}, ...inline(text.slice(i + mark.length, end), depth + 1)), end: end + mark.length };
    }
    hopeless.add(mark);
  }
  return null;
}

const LINK =
  /!?\[([^[\]\n]{0,500})\]\(\s{0,9}<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)>?(?:\s{1,9}"[^"\n]{0,300}")?\s{0,9}\)/y;
const BARE = /<?(https?:\/\/[^\s<>"`]{1,2000})>?/y;

function linkAt(text, i, depth) {
  if (text[i] === "[" || (text[i] === "!" && text[i + 1] === "[")) {
    LINK.lastIndex = i;
    const match = LINK.exec(text);
    const href = match && safeUrl(match[2]);
    // Images of other servers are not loaded: a request would tell them who reads this.
    if (href) return { node: link(href, ...(match[1] ? inline(match[1], depth + 1) : [href])), end: LINK.lastIndex };
  } else if ((text[i] === "h" || text[i] === "<") && !isWord(text[i - 1])) {
    BARE.lastIndex = i;
    const match = BARE.exec(text);
    if (match) {
      const isClosed = match[0].startsWith("<") && match[0].endsWith(">");
      const url = isClosed ? match[1] : match[1].replace(/[.,;:!?'*_)\]}]{1,9}$/, "");
      const href = safeUrl(url);
      if (href && (isClosed || !match[0].startsWith("<")))
        return { node: link(href, url), end: i + (isClosed ? match[0].length : url.length) };
    }
  }
  return null;
}

// Shows a text that grows.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.shown = [];
  }

  show(text) {
    const blocks = blocksOf(text.replaceAll("\r\n", "\n").split("\n"));
    let same = 0;
    while (same < blocks.length && same < this.shown.length && blocks[same].source === this.shown[same].source) same++;
    const [grown, before] = [blocks[same], this.shown[same]];
    if (grown?.kind === "code" && before?.kind === "code" && grown.info === before.info) {
      before.node.querySelector("code").textContent = grown.text; // its button keeps the focus
      grown.node = before.node;
    }
    for (const old of this.shown.slice(same)) if (old.node !== grown?.node) old.node.remove();
    for (let i = 0; i < blocks.length; i++) {
      if (i < same) blocks[i].node = this.shown[i].node;
      else if (!blocks[i].node) this.root.append((blocks[i].node = nodeOf(blocks[i], 0)));
    }
    this.shown = blocks;
  }
}
