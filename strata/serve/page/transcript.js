// Messages as elements: what was said, how fast it came, what went wrong.

import { copyButton, element, iconButton } from "./dom.js";
import { renderMarkdown } from "./markdown/render.js";

/**
 * The element of a message. `actions.retry` answers the conversation's last question again, `actions.enterKey` leads to
 * the key's field.
 */
export function messageElement(message, actions) {
  const made = element("article", { class: `message ${message.role}`, "aria-label": message.role === "user" ? "You" : "Reply" });
  made.append(element("div", { class: "content" }));
  showMessage(made, message, { ...actions, isLast: false, isStreaming: false });
  return made;
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

/** Bring an element up to its message. */
export function showMessage(shown, message, { retry, enterKey, isLast, isStreaming }) {
  const content = shown.querySelector(".content");
  if (message.role === "user") content.textContent = message.content;
  else renderMarkdown(content, message.content);
  showReasoning(shown, message, isStreaming);
  shown.querySelector(".waiting")?.remove();
  shown.querySelector(".notice")?.remove();
  if (isStreaming && !message.content && !message.reasoning) content.after(waiting());
  if (message.error) content.after(errorNotice(message.error, retry, enterKey));
  showFoot(shown, message, isStreaming, isLast ? retry : null);
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

function errorNotice(error, retry, enterKey) {
  const button = (label, action) => element("button", { type: "button", class: "button", click: action }, label);
  const remedy = error.status === 401 ? button("Enter a key", enterKey) : null;
  return element("div", { class: "notice", role: "alert" }, element("span", {}, error.message), remedy, button("Try again", retry));
}

function showFoot(shown, message, isStreaming, retry) {
  let foot = shown.querySelector(".message-foot");
  if (!foot) {
    foot = element("div", { class: "message-foot" });
    shown.append(foot);
  }
  const stats = element("span", { class: "stats" }, ...statistics(message, isStreaming).map((text) => element("span", {}, text)));
  if (isStreaming) {
    foot.replaceChildren(stats);
    return;
  }
  const buttons = [];
  if (message.content) buttons.push(copyButton(() => message.content, "Copy message"));
  if (retry && message.role === "assistant" && !message.error) buttons.push(iconButton("retry", "Answer again", retry));
  foot.replaceChildren(...buttons, stats);
}

/** What is told of a reply: {ttft: ms, rate: tokens/s, tokens, finish}. */
function statistics({ role, stats, stopped }, isStreaming) {
  if (role === "user" || !stats) return [];
  const told = [];
  if (stats.ttft !== undefined) told.push(`first token ${duration(stats.ttft)}`);
  if (stats.rate) told.push(`${stats.rate < 100 ? stats.rate.toFixed(1) : Math.round(stats.rate)} tokens/s`);
  if (stats.tokens) told.push(stats.tokens === 1 ? "1 token" : `${stats.tokens} tokens`);
  if (stopped) told.push("stopped");
  else if (stats.finish === "length" && !isStreaming) told.push(stats.full ? "the model had no more room" : "cut at its length");
  return told;
}

function duration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}
