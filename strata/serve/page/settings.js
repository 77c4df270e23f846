// The panel on the right: system prompt, sampling, key. An empty field leaves the choice to the server and the model.

import { key } from "./api.js";
import { keep, kept } from "./dom.js";

const SAMPLING = "strata.sampling";

export class Settings {
  /** systemChanged(text): the reader has written another system prompt; keyChanged(): another key. */
  constructor({ systemChanged, keyChanged }) {
    this.panel = document.getElementById("settings");
    this.toggle = document.getElementById("settings-toggle");
    this.form = document.getElementById("sampling");
    this.system = document.getElementById("system");
    this.key = document.getElementById("key");
    this.key.value = key.get();
    this.restore();
    this.toggle.addEventListener("click", () => this.show(this.panel.hidden));
    document.getElementById("settings-close").addEventListener("click", () => this.show(false));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", ({ target }) => {
      if (target.dataset.for) this.form.elements[target.dataset.for].value = target.value;
      this.changed();
    });
    this.form.addEventListener("reset", () => setTimeout(() => this.changed())); // after the fields have been emptied
    this.system.addEventListener("input", () => systemChanged(this.system.value));
    this.key.addEventListener("change", () => {
      key.set(this.key.value.trim());
      keyChanged();
    });
  }

  show(open) {
    this.panel.hidden = !open;
    this.toggle.setAttribute("aria-expanded", open);
    if (!open) this.toggle.focus();
  }

  get isOpen() {
    return !this.panel.hidden;
  }

  enterKey() {
    this.show(true);
    this.key.focus();
  }

  /** The fields that were set, as the API takes them. A value the field does not allow counts as none. */
  sampling() {
    const set = {};
    for (const field of this.form.querySelectorAll("input[type=number]")) {
      if (field.value !== "" && field.validity.valid) set[field.name] = field.valueAsNumber;
    }
    return set;
  }

  changed() {
    keep(SAMPLING, JSON.stringify(this.sampling()));
    this.showRanges();
  }

  restore() {
    try {
      for (const [name, value] of Object.entries(JSON.parse(kept(SAMPLING) ?? "{}"))) {
        this.form.elements[name].value = value;
      }
    } catch {
      // what was kept is not ours any more
    }
    this.showRanges();
  }

  showRanges() {
    for (const range of this.form.querySelectorAll("input[type=range]")) {
      const { value } = this.form.elements[range.dataset.for];
      range.value = value === "" ? 1 : value;
      range.classList.toggle("unset", value === "");
    }
  }
}
