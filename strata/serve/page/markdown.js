// The Markdown that models write, as elements: paragraphs, headings, lists, quotes, code, tables, emphasis, links.

import { codeBlock, element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DEEPEST = 20; // lists and quotes inside each other; what is deeper stays as it was written
const TABLE_RULE = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;

/**
 * Show `text` in `container`. Called again with a longer text it makes anew only what has changed, so a reply that is
 * still coming costs little, and what is selected in its finished part stays selected.
 */
export function renderMarkdown(container, text) {
  const blocks = splitBlocks(text.split("\n"));
  const before = container.renderedBlocks ?? [];
  blocks.forEach((block, at) => {
    const source = JSON.stringify(block);
    if (before[at] === source) return;
    const made = renderBlock(block);
    if (container.children[at]) container.children[at].replaceWith(made);
    else container.append(made);
    before[at] = source;
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
  before.length = blocks.length;
  container.renderedBlocks = before;
}

/** Blocks as plain values: {kind, ...}. An unfinished code block reaches to the end. */
export function splitBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const [block, next] = takeBlock(lines, at, depth);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

function takeBlock(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return takeFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return takeQuote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return takeList(lines, at, depth);
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return takeTable(lines, at);
  const end = endOf(lines, at + 1, (one) => one.trim() && !startsBlock(one));
  return [{ kind: "paragraph", text: lines.slice(at, end).join("\n") }, end];
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function endOf(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end])) end += 1;
  return end;
}

function takeFence(lines, at, [, marks, language]) {
  const closes = (line) => line.trim().startsWith(marks) && line.trim().replaceAll(marks[0], "") === "";
  const end = endOf(lines, at + 1, (line) => !closes(line));
  return [{ kind: "code", language, code: lines.slice(at + 1, end).join("\n") }, end + 1];
}

function takeQuote(lines, at, depth) {
  const end = endOf(lines, at, (line) => QUOTE.test(line));
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "quote", blocks: splitBlocks(inner, depth + 1) }, end];
}

/** Items of one depth; what is indented below an item is inside it. */
function takeList(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]];
    end += 1;
    while (end < lines.length && isInside(lines, end, indent.length)) {
      inner.push(lines[end].replace(new RegExp(`^ {0,${indent.length + item[2].length + 1}}`), ""));
      end += 1;
    }
    items.push(splitBlocks(inner, depth + 1));
    const next = endOf(lines, end, (line) => !line.trim());
    if (ITEM.test(lines[next] ?? "")) end = next;
  }
  return [{ kind: "list", ordered, start: ordered ? parseInt(mark, 10) : 1, items }, end];
}

function isInside(lines, at, indent) {
  const line = lines[at];
  if (!line.trim()) return /^ {2,}/.test(lines[at + 1] ?? "") && lines[at + 1].search(/\S/) > indent;
  return line.search(/\S/) > indent + 1 || (lines[at - 1].trim() && !startsBlock(line));
}

function takeTable(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.includes("|"));
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  return [{ kind: "table", head: cells(lines[at]), rows: lines.slice(at + 2, end).map(cells) }, end];
}

function renderBlock(block) {
  switch (block.kind) {
    case "heading":
      return element(`h${Math.min(6, block.level + 1)}`, {}, ...inline(block.text));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(renderBlock));
    case "code":
      return codeBlock(block.code, block.language);
    case "list":
      return element(block.ordered ? "ol" : "ul", { start: block.start === 1 ? null : block.start }, ...block.items.map(renderItem));
    case "table":
      return renderTable(block);
    default:
      return element("p", {}, ...inline(block.text));
  }
}

function renderItem(blocks) {
  if (blocks[0]?.kind !== "paragraph") return element("li", {}, ...blocks.map(renderBlock));
  return element("li", {}, ...inline(blocks[0].text), ...blocks.slice(1).map(renderBlock));
}

function renderTable({ head, rows }) {
  const row = (tag, cells) => element("tr", {}, ...head.map((_, at) => element(tag, {}, ...inline(cells[at] ?? ""))));
  const table = element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, ...rows.map((cells) => row("td", cells))));
  return element("div", { class: "table" }, table);
}

// Code, bold, italic, struck out, [text](address), a bare address. The text is bounded: for each "[" an end is looked for.
const INLINE = new RegExp(
  [
    /(`+)([^`]|[^`][^]*?[^`])\1(?!`)/,
    /\*\*(?=\S)([^]*?\S)\*\*/,
    /(?<![\w*])\*(?=[^\s*])([^*]*[^\s*])\*(?!\*)/,
    /(?<!\w)_(?=\S)([^_]*\S)_(?!\w)/,
    /~~(?=\S)([^]*?\S)~~/,
    /\[([^\]\n]{1,1000})\]\((https?:[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)\)/,
    /(https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?])/,
  ]
    .map((pattern) => pattern.source)
    .join("|"),
  "g",
);

/** Elements and texts of one run of text; a line end in it is a line end. */
function inline(text) {
  const made = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    made.push(...plain(text.slice(at, match.index)), marked(match));
    at = match.index + match[0].length;
  }
  return [...made, ...plain(text.slice(at))];
}

function marked([, , code, bold, italic, under, struck, label, address, bare]) {
  if (code !== undefined) return element("code", {}, code);
  if (bold !== undefined) return element("strong", {}, ...inline(bold));
  if (italic ?? under) return element("em", {}, ...inline(italic ?? under));
  if (struck !== undefined) return element("s", {}, ...inline(struck));
  return element("a", { href: address ?? bare, target: "_blank", rel: "noopener noreferrer" }, ...(label ? plain(label) : [bare]));
}

function plain(text) {
  return text.split("\n").flatMap((line, at) => (at ? [element("br"), line] : [line])).filter((part) => part !== "");
}
