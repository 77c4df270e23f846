// What went wrong, in words for people who talk with a model. The API's own words are for those who write programs.

const FIELDS = { temperature: "Temperature", top_p: "Top p", top_k: "Top k", max_tokens: "Most tokens", seed: "Seed" };

const BY_CODE = {
  queue_full: "Too many are asking at the moment.",
  concurrency: "Your key has as many replies under way as it may have at once.",
  requests_per_minute: "Your key has asked as often as it may in a minute.",
  tokens_per_minute: "Your key has used the text it may use in a minute.",
  draining: "The server is being shut down.",
  engine_dead: "The model has stopped working.",
  timeout: "The reply took too long and was ended.",
  model_not_found: "The server has another model now: reload the page.",
  generation_failed: "The model could not go on with this reply.",
  internal_error: "Something went wrong in the server. Its log says what.",
};

/**
 * One or two sentences for an error of the API: {status, code, param, message}, the last three if it gave any.
 * hasKey: whether this tab has a key. wait: seconds after which the server wants to be asked again. bytes: that were sent.
 */
export function inPlainWords({ status, code, param, message }, { hasKey = false, wait = null, bytes = 0 } = {}) {
  return [what(status, code, param, message, hasKey, bytes), when(wait)].filter(Boolean).join(" ");
}

function what(status, code, param, message, hasKey, bytes) {
  if (status === 413) return tooLarge(message, bytes);
  if (status === 401) return hasKey ? "The key is wrong: the server does not know it." : "The server asks for a key.";
  if (code === "context_length_exceeded") return tooLong(message);
  if (FIELDS[param]) return `The server does not take what the settings have for “${FIELDS[param]}”.`;
  if (BY_CODE[code]) return BY_CODE[code];
  if (status >= 500) return "The server is in trouble and did not answer.";
  return message ? `The server did not take this: ${message}` : `The server did not take this (HTTP ${status}).`;
}

/** The API says how many bytes it takes; a proxy before it may take fewer, and say nothing. */
function tooLarge(message, bytes) {
  const most = Number(/over (\d+) bytes/.exec(message)?.[1]);
  if (!(bytes > most)) return "This is too much text to send at once.";
  return `This is ${figure(bytes - most)} bytes too long to be sent at once: the server takes ${figure(most)}, and the conversation has ${figure(bytes)}.`;
}

function figure(count) {
  return count.toLocaleString("en");
}

/** The API says how many tokens were asked for, or, of what is far too much, how many characters. */
function tooLong(message) {
  const told = (pattern) => pattern.exec(message)?.slice(1).map((digits) => (digits === undefined ? null : Number(digits)));
  const tokens = told(/at most (\d+) tokens; you asked for (\d+) of prompt(?: and (\d+) of output)?/);
  if (tokens) {
    const [most, prompt, answer] = tokens;
    const over = figure(prompt + (answer ?? 1) - most);
    const has = answer === null ? figure(prompt) : `${figure(prompt)} besides the ${figure(answer)} that “${FIELDS.max_tokens}” in the settings keeps for the answer`;
    return `This is ${over} tokens too long for the model: it takes ${figure(most)} with the answer, and this has ${has}.`;
  }
  const characters = told(/(\d+) characters at most; \w+ has (\d+)/);
  if (!characters) return "This is too long for the model.";
  const [most, given] = characters;
  return `This is ${figure(given - most)} characters too long for the model: it takes ${figure(most)} at most, and this has ${figure(given)}.`;
}

function when(seconds) {
  if (seconds === null) return "";
  return Number(seconds) === 1 ? "Try again in a second." : `Try again in ${seconds} seconds.`;
}
