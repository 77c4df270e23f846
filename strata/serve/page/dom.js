// Elements made from data. Text is only ever set as text, so nothing a model writes can become markup.

import { keep } from "./storage.js";

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h10v11H9zM15 9V4H5v11h4",
  check: "M5 12.5l4.5 4.5L19 7.5",
  pencil: "M4 20l1-4.5L16 4.5l3.5 3.5L8.5 19zM14 6.5l3.5 3.5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M13 7a2 2 0 1 0 4 0a2 2 0 1 0-4 0M7 17a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
  sun: "M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M19 5l-1.4 1.4M6.4 17.6L5 19",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  system: "M3 5h18v11H3zM9 20h6M12 16v4",
  down: "M12 5v14M6 13l6 6 6-6",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h16",
  retry: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  before: "M14 6l-6 6 6 6",
  after: "M10 6l6 6-6 6",
  play: "M8 5l11 7-11 7z",
  pause: "M8 5v14M16 5v14",
};

/** An element with attributes (functions become listeners, true an empty attribute, null and false none) and children. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function iconButton(name, label, onClick, size = "small") {
  return element("button", { type: "button", class: `icon-button ${size}`, title: label, "aria-label": label, click: onClick }, icon(name));
}

/** A button that copies what `text()` gives and says that it did. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Without TLS, on another host than this machine, browsers offer this older way only.
  const field = element("textarea", { class: "visually-hidden" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** A code block with its language and a button that copies it. coloured: what is shown, if that is more than its text. */
export function codeBlock(code, language, ...coloured) {
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"), copyButton(() => code, "Copy code"));
  return element("div", { class: "code-block" }, head, element("pre", { tabindex: "0" }, element("code", {}, ...(coloured.length ? coloured : [code]))));
}

const THEMES = ["system", "light", "dark"];
const THEME_ICONS = { system: "system", light: "sun", dark: "moon" };

/** Give icons to the buttons of the page that name one, and make the theme button work. */
export function dress() {
  for (const button of document.querySelectorAll("[data-icon]")) button.prepend(icon(button.dataset.icon));
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const show = () => {
    const label = `Colours: ${root.dataset.theme}`;
    button.replaceChildren(icon(THEME_ICONS[root.dataset.theme] ?? "system"));
    button.title = label;
    button.setAttribute("aria-label", label);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
    keep("strata.theme", root.dataset.theme);
    show();
    document.dispatchEvent(new Event("themechange"));
  });
  show();
}
