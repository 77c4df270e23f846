// Markdown as the page reads it: markdown-it with task lists, footnotes, formulas and coloured code, and no HTML of a reply's own.

import { colouredHtml } from "./code.js";
import { mathPlugin } from "./math.js";

const md = markdownit({ html: false, linkify: true, breaks: true });
const { escapeHtml } = md.utils;
md.use(markdownitFootnote).use(markdownitTaskLists, { label: true }).use(mathPlugin);
// Notes stay where they are written, so that a block is final without those that follow it; notes in brackets need a list at the end.
md.core.ruler.disable("footnote_tail");
md.inline.ruler.disable("footnote_inline");
md.core.ruler.push("page", (state) => state.tokens.forEach(adapt));
md.validateLink = (address) => /^https?:/i.test(address);
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

const rules = md.renderer.rules;
rules.fence = rules.code_block = (tokens, at) => {
  const language = tokens[at].info.trim().split(/\s/)[0];
  const code = tokens[at].content.replace(/\n$/, "");
  return `<pre><code data-language="${escapeHtml(language)}">${colouredHtml(code, language, escapeHtml)}</code></pre>`;
};
rules.table_open = () => '<div class="table"><table>';
rules.table_close = () => "</table></div>";
// No picture is loaded from anywhere: its words lead to it.
rules.image = (tokens, at) => {
  const address = tokens[at].attrGet("src");
  return `<a href="${escapeHtml(address)}">${escapeHtml(tokens[at].content || address)}</a>`;
};
rules.footnote_ref = (tokens, at) => `<sup data-note="${escapeHtml(tokens[at].meta.label)}"><button type="button"></button></sup>`;
rules.footnote_reference_open = (tokens, at) => `<section data-note="${escapeHtml(tokens[at].meta.label)}"><button type="button"></button><div>`;
rules.footnote_reference_close = () => "</div></section>";

/** A reply's headings stand below the page's own; columns are aligned by classes, since the policy forbids styles in HTML. */
function adapt(token) {
  if (/^heading_/.test(token.type)) token.tag = `h${Math.min(6, Number(token.tag[1]) + 1)}`;
  const align = /^t[hd]_open$/.test(token.type) && token.attrGet("style");
  if (align) token.attrs = [["class", align.replace("text-align:", "")]];
}

/**
 * {blocks, env}: the blocks of the top level in order, each {line, html}: where it begins (null if that is not known) and a
 * function that gives its HTML; env: what the text defines. given: what the text before it defines.
 */
export function parse(source, given = {}) {
  const env = structuredClone(given);
  const blocks = [];
  let depth = 0;
  let tokens = [];
  for (const token of md.parse(source, env)) {
    tokens.push(token);
    depth += token.nesting;
    if (depth) continue;
    blocks.push(blockOf(tokens, env));
    tokens = [];
  }
  return { blocks, env };
}

function blockOf(tokens, env) {
  return {
    line: tokens.find(({ map }) => map)?.map[0] ?? null,
    html: () => md.renderer.render(tokens, md.options, { ...env, formulas: 0 }),
  };
}

/** The addresses and the footnotes that an env has, and nothing of where they were used. */
export function definitionsOf({ references = {}, footnotes = {} }) {
  const refs = Object.fromEntries(Object.keys(footnotes.refs ?? {}).map((label) => [label, -1]));
  return { references, footnotes: { refs } };
}
