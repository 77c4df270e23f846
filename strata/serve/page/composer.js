// The field for the next message: it sends with Enter, and what stands in it outlives a reload.

import { draftOf, keepDraft } from "./conversations.js";

const KEEP_MS = 300;

export class Composer {
  /** send(text): the reader is done; true if it was taken. stop(): the reply that is on its way is to end. */
  constructor({ send, stop }) {
    this.field = document.getElementById("prompt");
    this.button = document.getElementById("send");
    this.stop = document.getElementById("stop");
    this.draft = null; // id of the conversation that the text belongs to
    this.kept = ""; // as it was last kept or read
    const submit = () => send(this.field.value) && this.write("");
    document.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      submit();
    });
    this.field.addEventListener("input", () => {
      this.button.disabled = !this.field.value.trim();
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.keep(), KEEP_MS);
    });
    this.stop.addEventListener("click", stop);
    window.addEventListener("pagehide", () => this.keep());
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // as an address it would be that of a conversation
      this.field.focus();
    });
  }

  /** Go over to the draft of another conversation; id: "" for one that has not begun. */
  open(id) {
    if (this.draft !== null) this.keep();
    this.draft = id;
    this.kept = draftOf(id);
    this.write(this.kept);
    this.field.focus();
  }

  write(text) {
    this.field.value = text;
    this.button.disabled = !text.trim();
    this.keep();
  }

  /** What has not changed here is not kept again: another tab may have written something else since. */
  keep() {
    clearTimeout(this.timer);
    if (this.field.value === this.kept) return;
    this.kept = this.field.value;
    keepDraft(this.draft, this.kept);
  }

  show(isStreaming) {
    this.button.hidden = isStreaming;
    this.stop.hidden = !isStreaming;
  }
}
