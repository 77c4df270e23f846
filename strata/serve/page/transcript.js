// Messages as elements: what was said, how fast it came, what went wrong.

import { copyButton, element, iconButton } from "./dom.js";
import { renderMarkdown } from "./markdown/render.js";

/** The element of a message, empty so far. */
export function messageElement({ role }) {
  return element("article", { class: `message ${role}`, "aria-label": role === "user" ? "You" : "Reply" }, element("div", { class: "content" }));
}

/** What stands above the first message that still fits. `begin` opens a new conversation. */
export function forgottenNote(begin) {
  return element(
    "div",
    { class: "forgotten", role: "note" },
    element("span", {}, "The conversation has become longer than the model can read. It no longer sees what stands above."),
    element("button", { type: "button", class: "button", click: begin }, "Begin a new one"),
  );
}

/**
 * Bring an element up to its message. retry(): answer the conversation's last question again; enterKey(): go to the key's
 * field; edit(message): write it anew, the last question if none is given; turnTo(message, which): see another in its place.
 */
export function showMessage(shown, message, { retry, enterKey, edit, turnTo, isLast, isStreaming }) {
  const content = shown.querySelector(".content");
  if (message.role === "user") content.textContent = message.content;
  else renderMarkdown(content, message.content);
  showReasoning(shown, message, isStreaming);
  shown.querySelector(".waiting")?.remove();
  shown.querySelector(".notice")?.remove();
  if (isStreaming && !message.content && !message.reasoning) content.after(waiting());
  if (message.error) content.after(errorNotice(message.error, { retry, enterKey, edit, isLast }));
  showFoot(shown, message, { retry, edit, turnTo, isLast, isStreaming });
}

function showReasoning(shown, message, isStreaming) {
  if (!message.reasoning) return;
  let box = shown.querySelector(".reasoning");
  if (!box) {
    box = element("details", { class: "reasoning" }, element("summary", {}), element("div", {}));
    shown.prepend(box);
  }
  box.firstChild.textContent = isStreaming && !message.content ? "Thinking…" : "Thoughts";
  box.lastChild.textContent = message.reasoning.trim();
}

function waiting() {
  return element("span", { class: "waiting", "aria-label": "Waiting for the first token" }, element("i"), element("i"), element("i"));
}

function errorNotice(error, { retry, enterKey, edit, isLast }) {
  const button = (label, action) => element("button", { type: "button", class: "button", click: action }, label);
  const remedies = [];
  if (error.status === 401) remedies.push(button("Enter a key", enterKey));
  if (isLast && (error.status === 413 || error.code === "context_length_exceeded")) remedies.push(button("Edit the message", () => edit()));
  if (isLast) remedies.push(button("Try again", retry));
  return element("div", { class: "notice", role: "alert" }, element("span", {}, error.message), ...remedies);
}

function showFoot(shown, message, { retry, edit, turnTo, isLast, isStreaming }) {
  let foot = shown.querySelector(".message-foot");
  if (!foot) {
    foot = element("div", { class: "message-foot" });
    shown.append(foot);
  }
  shown.classList.toggle("forked", message.fork !== undefined);
  const stats = element("span", { class: "stats" }, ...statistics(message, isStreaming).map((text) => element("span", {}, text)));
  if (isStreaming) {
    foot.replaceChildren(stats);
    return;
  }
  const buttons = [];
  if (message.fork) buttons.push(branchSwitch(message, turnTo));
  if (message.content) buttons.push(copyButton(() => message.content, "Copy message"));
  if (message.role === "user") buttons.push(iconButton("pencil", "Edit message", () => edit(message)));
  if (isLast && message.role === "assistant" && !message.error) buttons.push(iconButton("retry", "Answer again", retry));
  foot.replaceChildren(...buttons, stats);
}

/** "2 / 3": which of the ways from here on is shown, and to the ones beside it. */
function branchSwitch(message, turnTo) {
  const { at, tails } = message.fork;
  const turn = (name, label, to) => {
    const button = iconButton(name, label, () => turnTo(message, to));
    button.disabled = tails[to] === undefined;
    return button;
  };
  const before = turn("before", "The version before", at - 1);
  const after = turn("after", "The version after", at + 1);
  return element("span", { class: "switch", role: "group", "aria-label": "Versions" }, before, element("span", {}, `${at + 1} / ${tails.length}`), after);
}

/** What is told of a reply: {ttft: ms, rate: tokens/s, tokens, finish}. */
function statistics({ role, stats, stopped, unfinished, cut }, isStreaming) {
  if (role === "user" || !stats) return [];
  const told = [];
  if (stats.ttft !== undefined) told.push(`first token ${duration(stats.ttft)}`);
  if (stats.rate) told.push(`${stats.rate < 100 ? stats.rate.toFixed(1) : Math.round(stats.rate)} tokens/s`);
  if (stats.tokens) told.push(stats.tokens === 1 ? "1 token" : `${stats.tokens} tokens`);
  if (cut) told.push("cut off when the page was closed or loaded again");
  else if (unfinished && !isStreaming) told.push("being written in another tab");
  else if (stopped) told.push("stopped");
  else if (stats.finish === "length" && !isStreaming) told.push(stats.full ? "the model had no more room" : "cut at its length");
  return told;
}

function duration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}
