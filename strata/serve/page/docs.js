// The API reference, made from /openapi.json: every route with its fields, an example, and a box to try it in.

import { key, request, servedModel } from "./api.js";
import { codeBlock, dress, element } from "./dom.js";
import { Schemas } from "./schema.js";
import { tryBox } from "./try.js";

const METHODS = ["get", "post", "put", "delete"];
const QUESTION = [{ role: "user", content: "What is 47 + 38?" }];

/** What to send to a route to see it work; the fields that a route requires where none is given here. */
const EXAMPLES = {
  "/v1/chat/completions": { messages: QUESTION, max_tokens: 100, stream: true },
  "/v1/completions": { prompt: "What is 47 + 38?", max_tokens: 40 },
  "/v1/responses": { input: "What is 47 + 38?", max_output_tokens: 100 },
  "/v1/embeddings": { input: "a line of text" },
  "/tokenize": { prompt: "a line of text" },
  "/detokenize": { tokens: [64, 65, 66] },
};

class Reference {
  constructor(document_, model) {
    this.document = document_;
    this.schemas = new Schemas(document_);
    this.model = model;
  }

  /** [{method, path, operation, id}] in the order of the document. */
  operations() {
    return Object.entries(this.document.paths).flatMap(([path, methods]) =>
      METHODS.filter((method) => methods[method]).map((method) => ({
        method,
        path,
        operation: methods[method],
        id: `${method}${path.replaceAll(/[^a-z0-9]+/gi, "-")}`,
      })),
    );
  }

  contents(operations) {
    const groups = groupBy(operations, tagOf);
    return [...groups].flatMap(([tag, members]) => [
      element("h2", {}, tag),
      ...members.map(({ method, path, id }) =>
        element("a", { href: `#${id}`, title: path }, methodMark(method), element("span", { class: "path" }, path)),
      ),
    ]);
  }

  section({ method, path, operation, id }) {
    const about = operation.description ?? operation.summary;
    const header = element("header", {}, element("h2", {}, methodMark(method), path), about ? element("p", { class: "description" }, about) : null);
    return element(
      "section",
      { class: "operation", id },
      header,
      element("div", {}, ...this.parameters(operation), ...this.body(operation), ...this.answers(operation)),
      element("div", { class: "example" }, ...this.example(method, path, operation)),
    );
  }

  parameters(operation) {
    const given = operation.parameters ?? [];
    if (!given.length) return [];
    const fields = given.map((one) => this.schemas.field(one.name, { description: one.description, ...one.schema }, one.required));
    return [element("h3", {}, "Parameters"), element("ul", { class: "fields" }, ...fields)];
  }

  body(operation) {
    const schema = bodySchema(operation);
    if (!schema) return [];
    return [element("h3", {}, "Body"), ...this.schemas.objects(schema).map((object) => this.schemas.fieldList(object))];
  }

  answers(operation) {
    const shown = Object.entries(operation.responses).map(([status, response]) => {
      const schema = response.content?.["application/json"]?.schema;
      const told = [element("code", {}, status), response.description ?? ""];
      const objects = schema ? this.schemas.objects(schema) : [];
      if (!objects.length) return element("div", {}, ...told);
      return element("details", {}, element("summary", {}, ...told), ...objects.map((object) => this.schemas.unfold(object, 1)));
    });
    return [element("h3", {}, "Answers"), element("div", { class: "answers" }, ...shown)];
  }

  example(method, path, operation) {
    const schema = bodySchema(operation);
    const body = schema ? this.exampleBody(path, schema) : null;
    return [codeBlock(curl(method, path, body), "shell"), tryBox({ method, path, body, parameters: operation.parameters ?? [] })];
  }

  exampleBody(path, schema) {
    const [object] = this.schemas.objects(schema);
    const takesModel = object?.properties?.model !== undefined;
    return { ...(takesModel ? { model: this.model } : {}), ...(EXAMPLES[path] ?? this.schemas.sample(schema)) };
  }
}

function tagOf({ operation }) {
  return operation.tags?.[0] ?? "other";
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) groups.set(keyOf(item), [...(groups.get(keyOf(item)) ?? []), item]);
  return groups;
}

function methodMark(method) {
  return element("span", { class: `method ${method}` }, method === "delete" ? "DEL" : method.toUpperCase());
}

function bodySchema(operation) {
  return operation.requestBody?.content?.["application/json"]?.schema;
}

function curl(method, path, body) {
  const lines = [`curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${location.origin}${path}`];
  if (key.get()) lines.push('-H "Authorization: Bearer $STRATA_API_KEY"');
  if (body !== null) {
    lines.push('-H "Content-Type: application/json"');
    lines.push(`-d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`);
  }
  return lines.join(" \\\n  ");
}

function pythonStart(model) {
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key="${key.get() ? "your key" : "none"}")`,
    "reply = client.chat.completions.create(",
    `    model="${model}",`,
    '    messages=[{"role": "user", "content": "What is 47 + 38?"}],',
    ")",
    "print(reply.choices[0].message.content)",
  ].join("\n");
}

/** The routes: always open beside the reference; above it, in a narrow window, a list that unfolds. */
function showContents(entries) {
  const wide = matchMedia("(min-width: 761px)");
  const list = element("details", {}, element("summary", {}, "Contents"), element("div", { class: "routes" }, ...entries));
  const fold = () => (list.open = wide.matches);
  list.addEventListener("click", ({ target }) => target.closest("a") && fold());
  wide.addEventListener("change", fold);
  fold();
  document.getElementById("contents").replaceChildren(list);
}

async function show() {
  const fault = document.getElementById("fault");
  try {
    const model = (await servedModel()).id;
    document.getElementById("model").textContent = model;
    document.getElementById("key-note").hidden = !key.get();
    document.getElementById("start").replaceChildren(codeBlock(pythonStart(model), "python"));
    const reference = new Reference(await (await request("/openapi.json")).json(), model);
    const operations = reference.operations();
    showContents(reference.contents(operations));
    document.getElementById("reference").replaceChildren(...operations.map((operation) => reference.section(operation)));
    if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  } catch (error) {
    fault.replaceChildren(error.status === 401 ? "The server asks for a key: enter it in the chat's settings, in this tab." : error.message);
    fault.hidden = false;
  }
}

dress();
show();
