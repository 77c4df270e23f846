// The list of conversations: open, rename, delete and take the deletion back, export and import.

import { deleteConversation, draftOf, keepDraft, markCut, renewed, saveConversation, titleOf } from "./conversations.js";
import { element, iconButton } from "./dom.js";
import { asFile, asText, fromText } from "./transfer.js";

const UNDO_MS = 6000;

export class Sidebar {
  /** open(conversation), deleted(conversation), restored(conversation), imported(conversations): told to the page, which owns them. */
  constructor({ open, deleted, restored, imported }) {
    this.tell = { open, deleted, restored, imported };
    this.list = document.getElementById("conversations");
    this.panel = document.getElementById("sidebar");
    this.menu = document.getElementById("menu");
    this.toast = document.getElementById("toast");
    this.shown = [[]]; // what was last to be drawn
    this.menu.addEventListener("click", () => this.show(!this.isOpen));
    this.export = document.getElementById("export");
    this.export.addEventListener("click", () => download(asFile(this.shown[0])));
    const chooser = document.getElementById("import-file");
    document.getElementById("import").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      await this.import(chooser.files[0]);
      chooser.value = ""; // so that the same file can be chosen again
    });
  }

  async import(file) {
    let given;
    try {
      given = fromText(await file.text());
    } catch (error) {
      this.say(error.message);
      return;
    }
    const here = new Map(fromText(asText(this.shown[0])).map((one) => [one.id, JSON.stringify(one)]));
    const fresh = [];
    for (const one of given) {
      const text = JSON.stringify(one);
      if (here.get(one.id) === text) continue;
      fresh.push(here.has(one.id) ? renewed(one) : one);
      if (!here.has(one.id)) here.set(one.id, text); // a file may have an id twice
    }
    fresh.forEach(markCut);
    const saved = fresh.filter(saveConversation);
    this.tell.imported(saved);
    const room = saved.length < fresh.length ? ` This browser has no room for ${fresh.length - saved.length} more.` : "";
    const known = given.length - fresh.length;
    this.say(`${conversations(saved.length)} imported${known ? `, ${known} here already` : ""}.${room}`);
  }

  /** In a narrow window the list lies over the chat while it is open. */
  show(open) {
    this.panel.classList.toggle("open", open);
    this.menu.setAttribute("aria-expanded", open);
  }

  get isOpen() {
    return this.panel.classList.contains("open");
  }

  render(conversations, current, isStreaming) {
    this.shown = [conversations, current, isStreaming];
    this.isStale = this.list.querySelector("input") !== null;
    if (this.isStale) return; // what is being written there would be lost; it is drawn when that is done
    const items = conversations.map((conversation) => {
      const open = element("button", { type: "button", class: "open", click: () => this.tell.open(conversation) }, titleOf(conversation));
      if (conversation === current) open.setAttribute("aria-current", "true");
      const rename = iconButton("pencil", "Rename", () => this.rename(item, conversation));
      const remove = iconButton("trash", "Delete", () => this.remove(conversation));
      const item = element("li", { class: "conversation" }, open, rename, remove);
      item.classList.toggle("current", conversation === current);
      item.classList.toggle("streaming", isStreaming(conversation));
      return item;
    });
    const none = element("li", { class: "none" }, "Nothing said so far.");
    this.list.replaceChildren(...(items.length ? items : [none]));
    this.export.disabled = items.length === 0;
  }

  rename(item, conversation) {
    const before = [...item.childNodes];
    const field = element("input", { "aria-label": "Name of the conversation", maxlength: "100" });
    field.value = titleOf(conversation);
    const done = (save) => {
      field.onblur = null;
      const now = this.shown[0].find(({ id }) => id === conversation.id); // another tab may have changed it
      if (save && now) now.title = field.value.trim();
      if (save && now) saveConversation(now);
      before[0].textContent = titleOf(now ?? conversation);
      item.replaceChildren(...before);
      before[0].focus();
      if (this.isStale) this.render(...this.shown);
    };
    field.onblur = () => done(true);
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      done(event.key === "Enter");
    });
    item.replaceChildren(field);
    field.select();
  }

  remove(conversation) {
    this.tell.deleted(conversation); // and the message field has kept its text
    const draft = draftOf(conversation.id);
    deleteConversation(conversation);
    const undo = element("button", { type: "button", class: "text-button" }, "Undo");
    undo.addEventListener("click", () => {
      this.toast.hidden = true;
      saveConversation(conversation);
      keepDraft(conversation.id, draft);
      this.tell.restored(conversation);
    });
    this.say(`“${titleOf(conversation)}” was deleted.`, undo);
  }

  say(...told) {
    this.toast.replaceChildren(...told);
    this.toast.hidden = false;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => (this.toast.hidden = true), UNDO_MS);
  }
}

function conversations(count) {
  return count === 1 ? "1 conversation" : `${count} conversations`;
}

function download(file) {
  const address = URL.createObjectURL(file);
  element("a", { href: address, download: file.name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
