// The panel on the right: system prompt, sampling, key. An empty field leaves the choice to the server and the model.

import { key } from "./api.js";
import { element } from "./dom.js";
import { keep, kept } from "./storage.js";

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
      target.closest(".field")?.querySelector(".field-note")?.remove();
      this.changed();
    });
    this.form.addEventListener("change", ({ target }) => target.type === "number" && this.bound(target));
    this.form.addEventListener("reset", () => setTimeout(() => this.emptied())); // after the fields have been emptied
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

  /** The most tokens that the model takes. */
  setMost(tokens) {
    this.form.elements.max_tokens.max = tokens;
  }

  /** {sampling, changes}: the fields that were set, as the API takes them, and sentences on those that had to be changed for it. */
  take() {
    const changes = this.fields().map((field) => this.bound(field)).filter(Boolean);
    return { sampling: this.sampling(), changes };
  }

  fields() {
    return [...this.form.querySelectorAll("input[type=number]")];
  }

  /** Bring a field to the nearest value that it may have; a sentence, also shown below the field, if that is another. */
  bound(field) {
    const label = field.labels[0].textContent;
    if (field.validity.badInput) {
      field.value = "";
      return this.say(field, `“${label}” was no number and is left out.`);
    }
    if (field.value === "") return null;
    const { name, value } = nearest(field);
    if (value === field.valueAsNumber) return null;
    field.value = value;
    return this.say(field, `“${label}” was set to ${field.value}, ${name}.`);
  }

  say(field, words) {
    tell(field, words);
    this.changed();
    return words;
  }

  /** What the fields have now; what they may not have counts as nothing. */
  sampling() {
    const set = {};
    for (const field of this.fields()) if (field.value !== "" && field.validity.valid) set[field.name] = field.valueAsNumber;
    return set;
  }

  emptied() {
    for (const note of this.form.querySelectorAll(".field-note")) note.remove();
    this.changed();
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

/** {value, name}: what a field may have that is nearest to what it has, and in words why. */
function nearest({ valueAsNumber, min, max, step }) {
  if (min !== "" && valueAsNumber < Number(min)) return { value: Number(min), name: "the least there is" };
  if (max !== "" && valueAsNumber > Number(max)) return { value: Number(max), name: "the most there is" };
  const digits = step.split(".")[1]?.length ?? 0;
  const name = digits ? `since it has ${digits} digits` : "since it is a whole number";
  return { value: Number(valueAsNumber.toFixed(digits)), name };
}

/** A word below a field. */
function tell(field, words) {
  const note = field.closest(".field").querySelector(".field-note") ?? element("p", { class: "field-note", role: "status" });
  note.textContent = words;
  field.closest(".field").append(note);
}
