// The one way from a string to elements: DOMPurify lets through what Markdown, formulas and coloured code are made of.

const HTML = "p br strong em s code pre ul ol li blockquote hr h2 h3 h4 h5 h6 table thead tbody tr th td a sup section div span input label button";
const FORMULA =
  "svg path line math semantics mrow mi mn mo ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mpadded mphantom mstyle mtable mtr mtd menclose";
const ATTRIBUTES =
  "class href start type checked disabled width height viewBox preserveAspectRatio d x1 x2 y1 y2 stroke-width xmlns display displaystyle " +
  "scriptlevel mathvariant mathcolor mathbackground mathsize stretchy largeop fence separator lspace rspace minsize maxsize " +
  "accent accentunder linethickness columnalign columnspacing columnlines rowspacing rowlines voffset depth notation";

const RULES = {
  ALLOWED_TAGS: ["#text", ...`${HTML} ${FORMULA}`.split(" ")],
  ALLOWED_ATTR: ATTRIBUTES.split(" "),
  FORBID_CONTENTS: ["annotation", "script", "style", "template", "title"],
  RETURN_DOM_FRAGMENT: true,
};

/** A fragment of the elements that `html` has of those that are allowed; no other address than that of a link is kept. */
export function cleanHtml(html) {
  return DOMPurify.sanitize(html, RULES);
}
