// A message of the reader's, open to be written anew.

import { element } from "./dom.js";

/** Put a field in place of what the element shows. send(text): the reader is done; true if it was taken. */
export function openEditor(shown, message, send) {
  if (shown.classList.contains("editing")) return;
  const field = element("textarea", { "aria-label": "Edit the message", rows: "2" });
  const close = () => {
    form.remove();
    shown.classList.remove("editing");
  };
  const submit = () => field.value.trim() && send(field.value) && close();
  const form = element(
    "form",
    { class: "editor" },
    field,
    element(
      "div",
      { class: "editor-foot" },
      element("button", { type: "button", class: "button", click: close }, "Cancel"),
      element("button", { type: "submit", class: "button primary" }, "Send"),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && event.target === field && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  field.value = message.content;
  shown.classList.add("editing");
  shown.querySelector(".content").after(form);
  field.focus();
}
