// JSON Schema, as an OpenAPI 3.1 document has it, in words: what a value is, and the fields of an object as a list.

import { element } from "./dom.js";

const DEEPEST = 6; // levels of fields inside fields; a schema that contains itself ends there

export class Schemas {
  constructor(document) {
    this.document = document;
  }

  resolve(schema) {
    if (!schema?.$ref) return schema ?? {};
    return schema.$ref.slice(2).split("/").reduce((inside, name) => inside?.[name], this.document) ?? {};
  }

  /** "string", "array of integers", "one of a, b", "string or null". */
  type(schema) {
    const found = this.resolve(schema);
    if (found.const !== undefined) return JSON.stringify(found.const);
    if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(" or ");
    const choices = found.anyOf ?? found.oneOf;
    if (choices) return [...new Set(choices.map((choice) => this.type(choice)))].join(" or ");
    if (found.allOf) return found.allOf.map((part) => this.type(part)).join(" and ");
    if (found.type === "array") return `array of ${found.items ? this.type(found.items) : "anything"}`;
    if (found.type === "object" || found.properties) return found.title && found.properties ? found.title : "object";
    return Array.isArray(found.type) ? found.type.join(" or ") : (found.type ?? "anything");
  }

  /** The objects that a value may be or hold, each with its own fields: what there is to open below a field. */
  objects(schema) {
    const found = this.resolve(schema);
    if (found.properties) return [found];
    const inner = [...(found.anyOf ?? []), ...(found.oneOf ?? []), ...(found.allOf ?? []), ...(found.items ? [found.items] : [])];
    return inner.flatMap((one) => this.objects(one));
  }

  /** The fields of an object, those that are needed first. */
  fieldList(schema, depth = 0) {
    const needed = new Set(schema.required ?? []);
    const entries = Object.entries(schema.properties ?? {});
    entries.sort(([one], [other]) => needed.has(other) - needed.has(one));
    return element("ul", { class: "fields" }, ...entries.map(([name, field]) => this.field(name, field, needed.has(name), depth)));
  }

  field(name, schema, isNeeded, depth = 0) {
    const found = this.resolve(schema);
    const objects = depth < DEEPEST ? this.objects(schema) : [];
    return element(
      "li",
      {},
      element("span", { class: "name" }, name),
      element("span", { class: "type" }, this.type(schema)),
      isNeeded ? element("span", { class: "needed" }, "required") : null,
      text("p", schema.description ?? (found.properties ? null : found.description)),
      text("p", bounds({ ...found, ...schema }), "bounds"),
      ...objects.map((object) => this.unfold(object, depth + 1)),
    );
  }

  unfold(object, depth) {
    const details = element("details", {}, element("summary", {}, object.title ?? "its fields"));
    // Made when it is opened: a schema may hold itself, and most of it is never looked at.
    details.addEventListener("toggle", () => {
      if (details.childElementCount === 1) {
        details.append(element("div", { class: "inside" }, text("p", object.description) ?? "", this.fieldList(object, depth)));
      }
    });
    return details;
  }

  /** A body with the fields that must be there, for a reader to change. */
  sample(schema, depth = 0) {
    const found = this.resolve(schema);
    if (found.examples?.length) return found.examples[0];
    if (found.const !== undefined) return found.const;
    if (found.default !== undefined && found.default !== null) return found.default;
    if (found.enum) return found.enum[0];
    const choices = found.anyOf ?? found.oneOf ?? found.allOf;
    if (choices) return this.sample(choices[0], depth);
    if (found.type === "array") return depth > DEEPEST ? [] : [this.sample(found.items, depth + 1)];
    if (found.type === "object" || found.properties) {
      const names = depth > DEEPEST ? [] : (found.required ?? []);
      return Object.fromEntries(names.map((name) => [name, this.sample(found.properties[name], depth + 1)]));
    }
    return { string: "string", integer: Math.max(1, found.minimum ?? 1), number: 1, boolean: true }[found.type] ?? null;
  }
}

function text(tag, words, className) {
  return words ? element(tag, { class: className }, words) : null;
}

const BOUNDS = {
  default: (value) => (value === null ? null : `default ${JSON.stringify(value)}`),
  minimum: (value) => `at least ${value}`,
  exclusiveMinimum: (value) => `over ${value}`,
  maximum: (value) => `at most ${value}`,
  exclusiveMaximum: (value) => `under ${value}`,
  minItems: (value) => `${value} or more items`,
  maxItems: (value) => `up to ${value} items`,
  minLength: (value) => `${value} or more characters`,
  maxLength: (value) => `up to ${value} characters`,
  pattern: (value) => `matches ${value}`,
};

function bounds(schema) {
  const variants = [schema, ...(schema.anyOf ?? [])];
  const told = Object.entries(BOUNDS).map(([name, tell]) => {
    const holder = variants.find((one) => one[name] !== undefined);
    return holder ? tell(holder[name]) : null;
  });
  return told.filter(Boolean).join(", ");
}
