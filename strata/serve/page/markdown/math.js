// Formulas: $..$, \(..\) in a line, $$..$$, \[..\] on their own, set by KaTeX.

const LONGEST = 2_500; // characters of a formula
const MOST = 20_000; // of all formulas in a block; each costs as much as 20 characters besides its own
const EACH = 20;
const CLOSE = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };

/** Teach a markdown-it parser both forms. A token's content is the formula, its markup how it was opened. */
export function mathPlugin(md) {
  md.inline.ruler.before("escape", "formula", inlineFormula);
  md.block.ruler.before("fence", "formula", blockFormula, { alt: ["paragraph", "reference", "blockquote", "list"] });
  const html = (tokens, at, options, env) => formulaHtml(tokens[at], env, md.utils.escapeHtml);
  md.renderer.rules.formula = html;
  md.renderer.rules.formula_block = (...given) => `<div class="formula">${html(...given)}</div>`;
}

function opening(text, at) {
  const two = text.slice(at, at + 2);
  return two in CLOSE ? two : text[at] === "$" ? "$" : null;
}

/**
 * A dollar opens before what is no space; the next one closes if no space is before it and no digit behind it, or there is no
 * formula: prices are none.
 */
function inlineFormula(state, silent) {
  const { src, pos } = state;
  const mark = opening(src, pos);
  if (mark === null) return false;
  const from = pos + mark.length;
  const end = closing(src.slice(0, Math.min(state.posMax, from + LONGEST)), from, mark);
  if (end < 0 || !src.slice(from, end).trim()) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    token.content = src.slice(from, end);
    token.markup = mark;
  }
  state.pos = end + mark.length;
  return true;
}

function closing(text, from, mark) {
  if (mark !== "$") return text.indexOf(CLOSE[mark], from);
  let at = text.indexOf("$", from);
  while (at > 0 && text[at - 1] === "\\") at = text.indexOf("$", at + 1);
  return at > from && !/\s/.test(text[from] + text[at - 1]) && !/\d/.test(text[at + 1] ?? "") ? at : -1;
}

/** Lines from one that begins with $$ or \[ to one that ends with its like, or to a blank one, and then it is text. */
function blockFormula(state, startLine, endLine, silent) {
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const line = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  const first = line(startLine);
  const mark = opening(first, 0);
  if (mark !== "$$" && mark !== "\\[") return false;
  const close = CLOSE[mark];
  const alone = first.indexOf(close, 2);
  if (alone >= 0 && first.slice(alone + 2).trim()) return false;
  if (silent) return true;
  let last = startLine;
  let end = alone;
  while (end < 0 && last + 1 < endLine && !state.isEmpty(last + 1) && state.sCount[last + 1] >= state.blkIndent) {
    last += 1;
    end = line(last).indexOf(close);
  }
  const lines = Array.from({ length: last - startLine + 1 }, (_, at) => line(startLine + at));
  const isWhole = end >= 0 && !lines.at(-1).slice(end + 2).trim();
  state.line = last + 1;
  if (isWhole) {
    lines.push(lines.pop().slice(0, end));
    const token = state.push("formula_block", "", 0);
    token.block = true;
    token.content = lines.join("\n").slice(2);
    token.markup = mark;
    token.map = [startLine, state.line];
  } else {
    state.push("paragraph_open", "p", 1).map = [startLine, state.line];
    const token = state.push("inline", "", 0);
    token.content = lines.join("\n");
    token.map = [startLine, state.line];
    token.children = [];
    state.push("paragraph_close", "p", -1);
  }
  return true;
}

/** What KaTeX cannot read, and what is too much for one block, stays as it was written. */
function formulaHtml({ content, markup }, env, escapeHtml) {
  env.formulas = (env.formulas ?? 0) + content.length + EACH;
  if (content.length <= LONGEST && env.formulas <= MOST) {
    try {
      const html = katex.renderToString(content, { displayMode: markup !== "$" && markup !== "\\(", strict: "ignore", maxSize: 20, maxExpand: 1000 });
      return html.replaceAll(' style="', ' data-style="'); // quotes in texts are escaped, so this is always an attribute
    } catch {
      // no formula that it knows
    }
  }
  return `<code class="formula-source">${escapeHtml(markup + content + CLOSE[markup])}</code>`;
}
