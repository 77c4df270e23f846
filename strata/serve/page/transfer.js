// Conversations as a file, and back. What a file holds is checked field by field, and only ever shown as what was said.

const FORMAT = "strata-conversations";
const VERSION = 1;
const DEEPEST = 100; // ways inside ways
const LONGEST_WORDS = 100; // of a file, in what is said of it

/** What a file of the conversations given holds. */
export function asText(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

export function asFile(conversations) {
  return new File([asText(conversations)], `${FORMAT}-${new Date().toISOString().slice(0, 10)}.json`, { type: "application/json" });
}

/** The conversations of a file's text. Throws an Error that says in a sentence what is wrong with it. */
export function fromText(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch {
    throw new Error("This file is no JSON: choose one that was exported here.");
  }
  if (given?.format !== FORMAT) throw new Error("This file holds no conversations: choose one that was exported here.");
  if (given.version !== VERSION) throw new Error(`This file is of version ${shortened(JSON.stringify(given.version))}; this page reads version ${VERSION}.`);
  return list(given.conversations, "conversations").map((one, at) => asConversation(one, `conversations[${at}]`));
}

const text = (value) => typeof value === "string";
const number = (value) => Number.isFinite(value);
const truth = (value) => typeof value === "boolean";
const count = (value) => Number.isInteger(value) && value >= 0;

const STATS = { ttft: number, rate: number, tokens: count, all: count, tokensPerCharacter: number, finish: text, full: truth };
const ERROR = { status: count, code: (value) => value === null || text(value), param: (value) => value === null || text(value), message: text };
const MESSAGE = {
  role: (value) => value === "user" || value === "assistant",
  content: text,
  reasoning: text,
  stopped: truth,
  cut: truth,
  unfinished: truth,
  stats: (value, where) => fields(value, STATS, [], where),
  error: (value, where) => fields(value, ERROR, ["status", "message"], where),
};
const CONVERSATION = { id: (value) => text(value) && /^[0-9a-f]{24}$/.test(value), title: text, system: text, created: number, updated: number, start: count };

/** What was read from JSON as a conversation of the fields that are known. Throws an Error that says `where` it is none. */
export function asConversation(value, where) {
  const { messages, ...rest } = object(value, where);
  const made = fields(rest, CONVERSATION, ["id", "title", "system", "created", "updated"], where);
  made.messages = said(messages, `${where}.messages`, 0);
  if (made.start >= made.messages.length) throw wrong(`${where}.start`);
  return made;
}

function said(value, where, depth) {
  if (depth > DEEPEST) throw wrong(where);
  return list(value, where).map((one, at) => {
    const { fork, ...rest } = object(one, `${where}[${at}]`);
    const made = fields(rest, MESSAGE, ["role", "content"], `${where}[${at}]`);
    if (fork !== undefined) made.fork = ways(fork, `${where}[${at}].fork`, depth + 1);
    return made;
  });
}

function ways(value, where, depth) {
  const { at, tails, ...rest } = object(value, where);
  if (Object.keys(rest).length || list(tails, where).length < 2 || tails[at] !== null) throw wrong(where);
  const read = tails.map((tail, which) => (which === at ? null : said(tail, `${where}.tails[${which}]`, depth)));
  if (read.some((tail) => tail && (!tail.length || tail[0].fork))) throw wrong(where);
  return { at, tails: read };
}

/** A new object of the fields that are known, each checked: by true, or by what the check makes of it. */
function fields(value, checks, needed, where) {
  const made = {};
  for (const [name, one] of Object.entries(object(value, where))) {
    const checked = Object.hasOwn(checks, name) && checks[name](one, `${where}.${name}`);
    if (!checked) throw wrong(`${where}.${name}`);
    made[name] = checked === true ? one : checked;
  }
  const missing = needed.find((name) => !(name in made));
  if (missing) throw wrong(`${where}.${missing}`);
  return made;
}

function object(value, where) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw wrong(where);
  return value;
}

function list(value, where) {
  if (!Array.isArray(value)) throw wrong(where);
  return value;
}

function shortened(words = "none") {
  return words.length > LONGEST_WORDS ? `${words.slice(0, LONGEST_WORDS)}…` : words;
}

function wrong(where) {
  return new Error(`Nothing was imported: ${shortened(where)} of this file is not what an exported file has there.`);
}
