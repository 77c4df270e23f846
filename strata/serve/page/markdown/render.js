// A reply as elements while it comes: what is finished is made once, what may still change is made anew.

import { cleanHtml } from "./clean.js";
import { definitionsOf, parse } from "./syntax.js";
import { codeBlock, element } from "../dom.js";

/**
 * Show `text` in `container`, one child for each block of its top level. Called again with a longer text it reads only
 * what comes behind the blocks that are settled, and replaces only elements whose HTML has changed: a reply that is still
 * coming costs little, and what is selected in its finished part stays selected.
 */
export function renderMarkdown(container, text) {
  const source = text.replaceAll(/\r\n?/g, "\n");
  let shown = container.shownMarkdown;
  if (!shown || !source.startsWith(shown.settled)) shown = nothing(shown);
  let { blocks, env } = parse(source.slice(shown.settled.length), shown.env);
  const defined = JSON.stringify(definitionsOf(env));
  if (shown.settled && defined !== shown.defined) {
    // An address or a footnote that earlier blocks may name: they are read again, and know it now.
    shown = nothing(shown);
    ({ blocks, env } = parse(source));
  }
  shown.defined = defined;
  showFrom(container, shown, blocks.map((block) => block.html()));
  while (container.children.length > shown.html.length) container.lastChild.remove();
  settle(shown, source, blocks);
  container.shownMarkdown = shown;
  if (container.querySelector("[data-note]")) numberFootnotes(container);
}

/**
 * settled: the beginning of the text whose blocks are final; count: how many these are; env: what it defines; html: of all
 * blocks, as they stand in the container; defined: what the whole text defines.
 */
function nothing(before) {
  return { settled: "", count: 0, env: undefined, html: before?.html ?? [], defined: "" };
}

function showFrom(container, { html, count }, made) {
  const changed = made.map((_, at) => at).filter((at) => made[at] !== html[count + at]);
  const elements = elementsOf(changed.map((at) => made[at]));
  changed.forEach((at, which) => {
    const before = container.children[count + at];
    if (before) before.replaceWith(elements[which]);
    else container.append(elements[which]);
  });
  html.splice(count, html.length, ...made);
}

/** One element for each string. They are cleaned together, since each call costs something, and apart if their tags do not balance. */
function elementsOf(htmls) {
  const together = [...dressed(htmls.join("")).children];
  return together.length === htmls.length ? together : htmls.map((html) => element("div", {}, dressed(html)));
}

/**
 * Blocks are final once another has begun behind a blank line: that ends paragraphs, tables and lists for good, unless the
 * line that follows has not come to its end ("-" may yet become an item).
 */
function settle(shown, source, blocks) {
  const tail = source.slice(shown.settled.length);
  const starts = [0];
  for (let end = tail.indexOf("\n"); end >= 0; end = tail.indexOf("\n", end + 1)) starts.push(end + 1);
  const isFinal = ({ line }) => line > 0 && line + 1 < starts.length && /^[ \t]*\n$/.test(tail.slice(starts[line - 1], starts[line]));
  const next = blocks.findLastIndex((block, at) => at > 0 && isFinal(block));
  if (next < 0) return;
  const segment = tail.slice(0, starts[blocks[next].line]);
  shown.env = definitionsOf(parse(segment, shown.env).env);
  shown.settled += segment;
  shown.count += next;
}

/** The elements of blocks, with what HTML alone cannot say. */
function dressed(html) {
  const part = cleanHtml(html);
  for (const styled of part.querySelectorAll("[data-style]")) {
    styled.style.cssText = styled.dataset.style; // in a script: as an attribute the page's policy forbids it
    styled.removeAttribute("data-style");
  }
  for (const code of part.querySelectorAll("pre > code")) {
    const { language } = code.dataset;
    code.parentElement.replaceWith(codeBlock(code.textContent, language, ...code.childNodes));
  }
  for (const link of part.querySelectorAll("a[href]")) dressLink(link);
  return part;
}

function dressLink(link) {
  if (link.protocol !== "https:" && link.protocol !== "http:") {
    link.replaceWith(...link.childNodes);
    return;
  }
  link.target = "_blank";
  link.rel = "noopener noreferrer";
}

/** Numbers in the order in which the text names them, and ways from a number to its note and back. */
function numberFootnotes(container) {
  const named = new Map(); // label -> [number, first place that names it]
  for (const mark of container.querySelectorAll("sup[data-note] > button")) {
    const label = mark.parentElement.dataset.note;
    if (!named.has(label)) named.set(label, [named.size + 1, mark]);
    mark.textContent = named.get(label)[0];
    mark.ariaLabel = `Footnote ${mark.textContent}`;
    mark.onclick = () => noteOf(container, label)?.scrollIntoView({ block: "nearest" });
  }
  for (const note of container.querySelectorAll("section[data-note]")) {
    const [number, mark] = named.get(note.dataset.note) ?? [note.dataset.note, null];
    const back = note.querySelector("button");
    back.textContent = number;
    back.ariaLabel = `Footnote ${number}, back to the text`;
    back.onclick = () => mark?.scrollIntoView({ block: "nearest" });
  }
}

function noteOf(container, label) {
  return [...container.querySelectorAll("section[data-note]")].find((note) => note.dataset.note === label);
}
