// A box to send a request from: its parameters, its body, and the answer as it comes.

import { key } from "./api.js";
import { codeBlock, element } from "./dom.js";

/** parameters: as OpenAPI has them; only those of the path and the query are asked for. */
export function tryBox({ method, path, body, parameters }) {
  const asked = parameters.filter((one) => one.in === "path" || one.in === "query");
  const inputs = asked.map((one) => element("input", { name: one.name, placeholder: one.required ? "required" : "" }));
  const text = body === null ? null : JSON.stringify(body, null, 2);
  const field = text === null ? null : element("textarea", { rows: String(Math.min(14, text.split("\n").length)), spellcheck: "false", "aria-label": "Body" });
  if (field) field.value = text;
  const button = element("button", { type: "submit", class: "button primary" }, "Try it");
  const state = element("span", { role: "status" });
  const answer = element("div");
  const form = element(
    "form",
    { class: "try" },
    ...asked.map((one, at) => element("label", {}, one.name, inputs[at])),
    field,
    element("div", { class: "row" }, button, state),
    answer,
  );
  let controller = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (controller) {
      controller.abort();
      return;
    }
    controller = new AbortController();
    button.textContent = "Stop";
    const values = Object.fromEntries(inputs.map((input) => [input.name, input.value]));
    await send({ method, url: fill(path, asked, values), body: field?.value, signal: controller.signal, state, answer });
    controller = null;
    button.textContent = "Try it";
  });
  return form;
}

function fill(path, parameters, values) {
  let url = path;
  const query = new URLSearchParams();
  for (const { name, in: place } of parameters) {
    if (place === "path") url = url.replace(`{${name}}`, encodeURIComponent(values[name]));
    else if (values[name]) query.set(name, values[name]);
  }
  return query.size ? `${url}?${query}` : url;
}

async function send({ method, url, body, signal, state, answer }) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const started = performance.now();
  const tell = (words, failed) => {
    state.textContent = `${words} · ${Math.round(performance.now() - started)} ms`;
    state.classList.toggle("failed", failed);
  };
  state.textContent = "…";
  try {
    const response = await fetch(url, { method: method.toUpperCase(), headers, body, signal });
    const status = `${response.status} ${response.statusText}`.trim();
    let text = "";
    for await (const part of parts(response.body)) {
      text += part;
      answer.replaceChildren(codeBlock(text, "answer"));
      tell(status, !response.ok);
    }
    answer.replaceChildren(codeBlock(readable(text), "answer"));
    tell(status, !response.ok);
  } catch (error) {
    tell(error.name === "AbortError" ? "stopped" : "no answer", error.name !== "AbortError");
  }
}

async function* parts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
