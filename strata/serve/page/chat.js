// The chat page: which conversation is open, which replies are on their way, and what the reader does.

import { idInAddress, wasShown, writeAddress } from "./address.js";
import { servedModel } from "./api.js";
import { branch, takeBranch } from "./branches.js";
import { Composer } from "./composer.js";
import { allConversations, concerns, keepDraft, markCut, newConversation, newestFirst, saveConversation } from "./conversations.js";
import { dress, element } from "./dom.js";
import { openEditor } from "./editor.js";
import { Pace } from "./pace.js";
import { asMessages, receiveReply } from "./reply.js";
import { forgetHalf, makeRoom } from "./room.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { keep, kept, keptNames } from "./storage.js";
import { forgottenNote, messageElement, showMessage } from "./transcript.js";

const OPEN = "strata.open";
const SAVE_MS = 1000; // a reply that is on its way is kept this often, so that a reload loses little of it
const LEAVING_MS = 5000; // from when a page is about to be left, until it has been or is not
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
    this.toEnd = document.getElementById("to-end");
    this.announce = document.getElementById("announce");
    this.model = null;
    this.limit = Infinity; // tokens that the model takes, question and answer together
    this.forgotten = forgottenNote(() => this.open(newConversation()));
    this.conversations = allConversations();
    this.conversations.forEach(markCut);
    this.replies = new Map(); // conversation -> AbortController of the reply that is on its way
    this.settings = new Settings({
      systemChanged: (text) => this.setSystem(text),
      keyChanged: () => this.showModel(),
    });
    this.sidebar = new Sidebar({
      open: (conversation) => this.open(conversation),
      deleted: (conversation) => this.forget(conversation),
      restored: (conversation) => this.takeBack(conversation),
      imported: (conversations) => this.takeIn(conversations),
    });
    this.composer = new Composer({ send: (text) => this.ask(text), stop: () => this.stop() });
    this.listen();
    this.openAddress(true);
    this.showModel();
  }

  listen() {
    document.getElementById("new").addEventListener("click", () => this.open(newConversation()));
    this.toEnd.addEventListener("click", () => this.follow(true));
    this.scroll.addEventListener("scroll", () => (this.toEnd.hidden = this.isAtEnd()));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.escape());
    window.addEventListener("storage", ({ key }) => concerns(key) && this.readAgain(key));
    window.addEventListener("popstate", () => this.openAddress(false));
    window.addEventListener("beforeunload", () => this.aboutToLeave());
    window.addEventListener("pagehide", () => this.leave());
    const examples = EXAMPLES.map((text) => element("button", { type: "button", click: () => this.ask(text) }, text));
    document.getElementById("examples").append(...examples);
  }

  async showModel() {
    const shown = document.getElementById("model");
    try {
      const { id, max_model_len: limit } = await servedModel();
      this.model = id;
      this.limit = limit;
      this.settings.setMost(limit);
      shown.textContent = this.model;
      document.title = `${this.model} · Strata`;
    } catch (error) {
      shown.textContent = error.status === 401 ? "key needed" : "no answer";
    }
  }

  // Conversations

  /** The conversation of the page's address. Where a visit begins without one, that is the one that was open last. */
  openAddress(isStart) {
    const id = idInAddress() ?? (isStart && !wasShown() ? kept(OPEN) : null);
    const found = this.conversations.find((one) => one.id === id);
    if (idInAddress() !== null && !found) this.sidebar.say("That conversation is not kept in this browser.");
    this.open(found ?? newConversation(), true);
  }

  /** replace: it takes the place of what was open in the browser's history. */
  open(conversation, replace = false) {
    const isKept = this.conversations.includes(conversation);
    this.current = conversation;
    keep(OPEN, conversation.id);
    writeAddress(isKept ? conversation.id : null, replace);
    this.sidebar.show(false);
    this.show();
    this.follow(true);
    this.composer.open(isKept ? conversation.id : "");
  }

  /** All of the open conversation, made anew. */
  show() {
    this.settings.system.value = this.current.system;
    this.elements = new Map();
    this.transcript.replaceChildren();
    for (const message of this.current.messages) this.showMessage(message);
    this.showForgotten();
    this.render();
  }

  setSystem(text) {
    this.current.system = text;
    if (this.conversations.includes(this.current)) this.save(this.current);
  }

  forget(conversation) {
    this.stop(conversation);
    this.conversations = this.conversations.filter((one) => one !== conversation);
    if (conversation === this.current) this.open(newConversation(), true);
    else this.render();
  }

  takeBack(conversation) {
    this.takeIn([conversation]);
    this.open(conversation);
  }

  takeIn(conversations) {
    this.conversations = [...this.conversations, ...conversations].sort(newestFirst);
    this.render();
  }

  save(conversation) {
    if (saveConversation(conversation)) return;
    const why = keptNames() === null ? "This browser keeps nothing of this page" : "This browser has no room to keep the conversation";
    this.sidebar.say(`${why}: export it before you leave${keptNames() === null ? "" : ", or delete an older one"}.`);
  }

  /** Another tab has changed an entry of the storage, null for all: take over what that concerns, but what is answered here. */
  readAgain(name) {
    const isChanged = (one) => concerns(name, one) && !this.replies.has(one);
    const stay = this.conversations.filter((one) => !isChanged(one));
    const read = allConversations().filter((one) => concerns(name, one) && !stay.some(({ id }) => id === one.id));
    this.conversations = [...stay, ...read].sort(newestFirst);
    if (!isChanged(this.current)) return this.render();
    this.current = read.find(({ id }) => id === this.current.id) ?? this.current;
    this.show();
  }

  /** Browsers end connections when they leave a page, some before they say that it goes away. */
  aboutToLeave() {
    this.leaving = true;
    setTimeout(() => (this.leaving = false), LEAVING_MS);
  }

  /** The page goes away, and what is on its way ends with it. */
  leave() {
    for (const conversation of this.replies.keys()) {
      markCut(conversation);
      this.stop(conversation);
      if (this.conversations.includes(conversation)) saveConversation(conversation);
    }
  }

  // Questions and replies

  /** Ask, in place of the message at `at` and all behind it if there is one. False if that cannot be now. */
  ask(text, at = this.current.messages.length) {
    const conversation = this.current;
    if (!text.trim() || !this.isFree()) return false;
    const message = { role: "user", content: text.trim() };
    if (at < conversation.messages.length) message.fork = this.branch(at);
    if (!this.conversations.includes(conversation)) {
      this.conversations.unshift(conversation);
      writeAddress(conversation.id, true);
      keepDraft("", "");
      this.composer.draft = conversation.id;
    }
    conversation.messages.push(message);
    this.showMessage(message);
    this.answer(conversation);
    return true;
  }

  answerAgain() {
    const conversation = this.current;
    if (!this.isFree()) return;
    this.answer(conversation, this.branch(conversation.messages.length - 1));
  }

  /** Put aside what was said from `at` on; the fork for what takes its place. */
  branch(at) {
    for (const message of this.current.messages.slice(at)) this.elements.get(message).remove();
    return branch(this.current, at);
  }

  isFree() {
    const isHere = this.replies.has(this.current);
    const isElsewhere = !isHere && this.current.messages.at(-1)?.unfinished === true;
    if (isHere) this.sidebar.say("A reply is on its way. Wait for it, or stop it first.");
    if (isElsewhere) this.sidebar.say("A reply is on its way in another tab. Wait for it, or load this page again if that tab is gone.");
    return !isHere && !isElsewhere;
  }

  async answer(conversation, fork) {
    const { sampling, changes } = this.settings.take();
    if (changes.length) this.sidebar.say(changes.join(" "));
    makeRoom(conversation, this.limit, sampling.max_tokens);
    const reply = { role: "assistant", content: "", stats: {}, unfinished: true, fork };
    const controller = new AbortController();
    const pace = new Pace(() => reply.unfinished && this.showReply(conversation, reply));
    conversation.messages.push(reply);
    conversation.updated = Date.now();
    this.conversations.sort(newestFirst);
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
        changed: () => this.changed(conversation, pace),
      });
    } while (isTooLong(reply.error, sampling.max_tokens, this.limit) && forgetHalf(conversation));
    if (this.leaving && reply.error?.status === 0) {
      delete reply.error;
      reply.cut = true;
    }
    if (reply.stats.all >= this.limit) reply.stats.full = true;
    this.replies.delete(conversation);
    delete reply.unfinished;
    if (this.conversations.includes(conversation)) this.save(conversation);
    this.showReply(conversation, reply);
    this.render();
    this.announce.textContent = reply.error ? "The reply failed." : reply.stopped ? "Stopped." : reply.content;
    if (this.model === null) this.showModel();
  }

  /** Show and keep what has come, but not for every token. */
  changed(conversation, pace) {
    pace.changed();
    if (performance.now() - (this.saved ?? 0) > SAVE_MS) {
      this.saved = performance.now();
      if (this.conversations.includes(conversation)) this.save(conversation);
    }
  }

  stop(conversation = this.current) {
    this.replies.get(conversation)?.abort();
  }

  showReply(conversation, reply) {
    if (conversation !== this.current) return;
    const wasAtEnd = this.isAtEnd();
    this.showMessage(reply);
    this.follow(wasAtEnd);
  }

  /** Open a message of the reader's to be written anew; the last one if none is given. */
  edit(message = this.current.messages.findLast(({ role }) => role === "user")) {
    const at = this.current.messages.indexOf(message);
    if (at >= 0 && this.isFree()) openEditor(this.elements.get(message), message, (text) => this.ask(text, at));
  }

  /** Show another way that the conversation went from a message on. */
  turnTo(message, which) {
    if (!this.isFree()) return;
    const at = this.current.messages.indexOf(message);
    const place = this.scroll.scrollTop;
    takeBranch(this.current, at, which);
    this.save(this.current);
    this.show();
    this.scroll.scrollTop = place;
    this.elements.get(this.current.messages[at]).querySelector(".switch button:enabled").focus();
  }

  // What is seen

  showMessage(message) {
    const actions = {
      retry: () => this.answerAgain(),
      enterKey: () => this.settings.enterKey(),
      edit: (which) => this.edit(which),
      turnTo: (which, to) => this.turnTo(which, to),
    };
    let shown = this.elements.get(message);
    if (!shown) {
      shown = messageElement(message);
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
    this.composer.show(this.replies.has(this.current));
  }

  isAtEnd() {
    return this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < NEAR_END;
  }

  follow(should) {
    if (should) this.scroll.scrollTop = this.scroll.scrollHeight;
    this.toEnd.hidden = this.isAtEnd();
  }

  escape() {
    if (this.replies.has(this.current)) this.stop();
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
