// The chat page: which conversation is open, which replies are on their way, and what the reader does.

import { servedModel } from "./api.js";
import { allConversations, isConversation, newConversation, saveConversation } from "./conversations.js";
import { dress, element, keep, kept } from "./dom.js";
import { asMessages, receiveReply } from "./reply.js";
import { forgetHalf, makeRoom } from "./room.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { forgottenNote, messageElement, showMessage } from "./transcript.js";

const OPEN = "strata.open";
const SAVE_MS = 1000; // a reply that is on its way is kept this often, so that a reload loses little of it
const NEAR_END = 60; // pixels
const EXAMPLES = [
  "What is 47 + 38?",
  "Sort these numbers: 42, 7, 93, 18, 65",
  "Reverse the word 'planet'.",
  "How many letters e are in 'sentence'?",
];

class Chat {
  constructor() {
    this.scroll = document.getElementById("scroll");
    this.transcript = document.getElementById("transcript");
    this.prompt = document.getElementById("prompt");
    this.send = document.getElementById("send");
    this.stop = document.getElementById("stop");
    this.toEnd = document.getElementById("to-end");
    this.announce = document.getElementById("announce");
    this.model = null;
    this.limit = Infinity; // tokens that the model takes, question and answer together
    this.forgotten = forgottenNote(() => this.open(newConversation()));
    this.conversations = allConversations();
    this.replies = new Map(); // conversation -> AbortController of the reply that is on its way
    this.settings = new Settings({
      systemChanged: (text) => this.setSystem(text),
      keyChanged: () => this.showModel(),
    });
    this.sidebar = new Sidebar({
      open: (conversation) => this.open(conversation),
      deleted: (conversation) => this.forget(conversation),
      restored: (conversation) => this.takeBack(conversation),
    });
    this.listen();
    this.open(this.conversations.find((one) => one.id === kept(OPEN)) ?? newConversation());
    this.showModel();
  }

  listen() {
    document.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.ask(this.prompt.value);
    });
    this.prompt.addEventListener("input", () => this.showButtons());
    this.stop.addEventListener("click", () => this.replies.get(this.current)?.abort());
    document.getElementById("new").addEventListener("click", () => this.open(newConversation()));
    this.toEnd.addEventListener("click", () => this.follow(true));
    this.scroll.addEventListener("scroll", () => (this.toEnd.hidden = this.isAtEnd()));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.escape());
    window.addEventListener("storage", ({ key }) => isConversation(key) && this.readAgain());
    const examples = EXAMPLES.map((text) => element("button", { type: "button", click: () => this.ask(text) }, text));
    document.getElementById("examples").append(...examples);
  }

  async showModel() {
    const shown = document.getElementById("model");
    try {
      const { id, max_model_len: limit } = await servedModel();
      this.model = id;
      this.limit = limit;
      shown.textContent = this.model;
      document.title = `${this.model} · Strata`;
    } catch (error) {
      shown.textContent = error.status === 401 ? "key needed" : "no answer";
    }
  }

  // Conversations

  open(conversation) {
    this.current = conversation;
    keep(OPEN, conversation.id);
    this.settings.system.value = conversation.system;
    this.elements = new Map();
    this.transcript.replaceChildren();
    for (const message of conversation.messages) this.showMessage(message);
    this.showForgotten();
    this.sidebar.show(false);
    this.render();
    this.follow(true);
    this.prompt.focus();
  }

  setSystem(text) {
    this.current.system = text;
    if (this.conversations.includes(this.current)) this.save(this.current);
  }

  forget(conversation) {
    this.replies.get(conversation)?.abort();
    this.conversations = this.conversations.filter((one) => one !== conversation);
    if (conversation === this.current) this.open(newConversation());
    else this.render();
  }

  takeBack(conversation) {
    this.conversations = [...this.conversations, conversation].sort((one, other) => other.updated - one.updated);
    this.open(conversation);
  }

  save(conversation) {
    if (!saveConversation(conversation)) this.sidebar.say("This browser has no room to keep the conversation. Delete an older one.");
  }

  /** Another tab has changed something: take over all but what is on its way here. */
  readAgain() {
    if (this.replies.size) return;
    this.conversations = allConversations();
    const same = this.conversations.find((one) => one.id === this.current.id);
    if (same) this.open(same);
    else this.render();
  }

  // Questions and replies

  async ask(text) {
    const conversation = this.current;
    if (!text.trim() || this.replies.has(conversation)) return;
    this.prompt.value = "";
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    conversation.messages.push({ role: "user", content: text.trim() });
    this.showMessage(conversation.messages.at(-1));
    await this.answer(conversation);
  }

  async answerAgain() {
    const conversation = this.current;
    if (this.replies.has(conversation)) return;
    const last = conversation.messages.pop();
    this.elements.get(last)?.remove();
    await this.answer(conversation);
  }

  async answer(conversation) {
    const controller = new AbortController();
    const sampling = this.settings.sampling();
    makeRoom(conversation, this.limit, sampling.max_tokens);
    const reply = { role: "assistant", content: "", stats: {} };
    conversation.messages.push(reply);
    conversation.updated = Date.now();
    this.conversations.sort((one, other) => other.updated - one.updated);
    this.replies.set(conversation, controller);
    this.save(conversation);
    this.showMessage(reply);
    this.render();
    this.follow(true);
    this.announce.textContent = "The reply is being written.";
    do {
      delete reply.error;
      this.showForgotten();
      await receiveReply(reply, {
        messages: asMessages(conversation),
        model: this.model ?? undefined,
        sampling,
        signal: controller.signal,
        changed: () => this.changed(conversation, reply),
      });
    } while (isTooLong(reply.error, sampling.max_tokens, this.limit) && forgetHalf(conversation));
    if (reply.stats.all >= this.limit) reply.stats.full = true;
    this.replies.delete(conversation);
    cancelAnimationFrame(this.frame);
    this.frame = null;
    if (this.conversations.includes(conversation)) this.save(conversation);
    this.showReply(conversation, reply);
    this.render();
    this.announce.textContent = reply.error ? "The reply failed." : reply.stopped ? "Stopped." : reply.content;
    if (this.model === null) this.showModel();
  }

  /** Show and keep what has come, but not for every token. */
  changed(conversation, reply) {
    if (!this.frame) {
      this.frame = requestAnimationFrame(() => {
        this.frame = null;
        this.showReply(conversation, reply);
      });
    }
    if (performance.now() - (this.saved ?? 0) > SAVE_MS) {
      this.saved = performance.now();
      if (this.conversations.includes(conversation)) this.save(conversation);
    }
  }

  showReply(conversation, reply) {
    if (conversation !== this.current) return;
    const wasAtEnd = this.isAtEnd();
    this.showMessage(reply);
    this.follow(wasAtEnd);
  }

  // What is seen

  showMessage(message) {
    const actions = { retry: () => this.answerAgain(), enterKey: () => this.settings.enterKey() };
    let shown = this.elements.get(message);
    if (!shown) {
      shown = messageElement(message, actions);
      this.elements.set(message, shown);
      this.transcript.append(shown);
    }
    const isLast = message === this.current.messages.at(-1);
    const isStreaming = isLast && this.replies.has(this.current);
    showMessage(shown, message, { ...actions, isLast, isStreaming });
  }

  /** Above the first message that the model still reads, if that is not the first of all. */
  showForgotten() {
    const first = this.current.start ? this.current.messages[this.current.start] : null;
    if (first) this.elements.get(first).before(this.forgotten);
    else this.forgotten.remove();
  }

  render() {
    const [before, last] = this.current.messages.slice(-3).filter((message) => message.role === "assistant").slice(-2);
    for (const message of [before, last]) if (message) this.showMessage(message);
    this.sidebar.render(this.conversations, this.current, (conversation) => this.replies.has(conversation));
    document.getElementById("empty").hidden = this.current.messages.length > 0;
    this.showButtons();
  }

  showButtons() {
    const streaming = this.replies.has(this.current);
    this.send.hidden = streaming;
    this.send.disabled = !this.prompt.value.trim();
    this.stop.hidden = !streaming;
  }

  isAtEnd() {
    return this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < NEAR_END;
  }

  follow(should) {
    if (should) this.scroll.scrollTop = this.scroll.scrollHeight;
    this.toEnd.hidden = this.isAtEnd();
  }

  escape() {
    if (this.replies.has(this.current)) this.replies.get(this.current).abort();
    else if (this.sidebar.isOpen) this.sidebar.show(false);
    else if (this.settings.isOpen) this.settings.show(false);
  }
}

/** Whether a shorter conversation may be answered: not where the reader wants more than half of what the model takes. */
function isTooLong(error, most, limit) {
  return error && (error.status === 413 || error.code === "context_length_exceeded") && !(most > limit / 2);
}

dress();
new Chat();
