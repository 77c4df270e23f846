// The colours of code: highlight.js, for the languages that it has here.

const MOST = 20_000; // characters; what is longer stays in one colour, since a reply that comes is coloured again and again
const LONGEST_LINE = 1_000; // its patterns take time with the square of what they look through

/** HTML of the code as text, with the parts of known languages in spans. */
export function colouredHtml(code, language, escapeHtml) {
  if (!hljs.getLanguage(language) || code.length > MOST || code.split("\n").some((line) => line.length > LONGEST_LINE)) return escapeHtml(code);
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}
