// Conversations, kept in this browser: one entry of localStorage each, so that two tabs do not overwrite each other's.

import { drop, keep, kept, keptNames } from "./storage.js";
import { asConversation } from "./transfer.js";

const PREFIX = "strata.conversation.";
const DRAFT = "strata.draft."; // and the conversation's id; nothing for one that has not begun
const LONGEST_TITLE = 60;

/**
 * {id, title, system, created, updated, messages}; a message is {role, content} and what became of it: a reply has
 * `unfinished` while it is written, `cut` if its page went away before it was complete; `fork` is explained in branches.js.
 */
export function newConversation() {
  const now = Date.now();
  return { id: randomId(), title: "", system: "", created: now, updated: now, messages: [] };
}

/** All that are kept, the one used last first. What is not ours, of another version or cut, is left where it is. */
export function allConversations() {
  const found = [];
  for (const name of keptNames() ?? []) {
    if (!name.startsWith(PREFIX)) continue;
    try {
      found.push(asConversation(JSON.parse(kept(name)), name));
    } catch {
      // nothing that can be shown
    }
  }
  return found.sort(newestFirst);
}

export function newestFirst(one, other) {
  return other.updated - one.updated;
}

/** False if the browser has no room for it. */
export function saveConversation(conversation) {
  return keep(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function deleteConversation(conversation) {
  drop(PREFIX + conversation.id);
  keepDraft(conversation.id, "");
}

/** A copy with an id of its own. */
export function renewed(conversation) {
  return { ...conversation, id: randomId() };
}

/** Replies that were being written when their page went away will get no more. Only for what no page writes any more. */
export function markCut({ messages }) {
  for (const message of messages) {
    if (message.unfinished) message.cut = true;
    delete message.unfinished;
    for (const tail of message.fork?.tails ?? []) if (tail) markCut({ messages: tail });
  }
}

/** What stands in the message field and was not sent. */
export function draftOf(id) {
  return kept(DRAFT + id) ?? "";
}

export function keepDraft(id, text) {
  if (text) keep(DRAFT + id, text);
  else drop(DRAFT + id);
}

/** Whether a change of this entry of the storage, null for all, concerns a conversation, or this one. */
export function concerns(storageKey, conversation = { id: "" }) {
  return storageKey === null || storageKey.startsWith(PREFIX + conversation.id);
}

/** What the list calls it: the name it was given, or how it begins. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user");
  if (!first) return "New conversation";
  const line = first.content.trim().split("\n")[0];
  return line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE - 1)}…` : line;
}

// crypto.randomUUID is missing where the page is not served over TLS or from this machine.
function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
