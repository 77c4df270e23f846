// What went wrong, in words for people who talk with a model. The API's own words are for those who write programs.

const FIELDS = { temperature: "Temperature", top_p: "Top p", top_k: "Top k", max_tokens: "Most tokens", seed: "Seed" };

const BY_CODE = {
  context_length_exceeded: "This is too long for the model.",
  body_too_large: "This is too much text to send at once.",
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
 * hasKey: whether this tab has a key. wait: seconds after which the server wants to be asked again.
 */
export function inPlainWords({ status, code, param, message }, { hasKey = false, wait = null } = {}) {
  return [what(status, code, param, message, hasKey), when(wait)].filter(Boolean).join(" ");
}

function what(status, code, param, message, hasKey) {
  if (status === 401) return hasKey ? "The key is wrong: the server does not know it." : "The server asks for a key.";
  if (FIELDS[param]) return `The server does not take what the settings have for “${FIELDS[param]}”.`;
  if (BY_CODE[code]) return BY_CODE[code];
  if (status >= 500) return "The server is in trouble and did not answer.";
  return message ? `The server did not take this: ${message}` : `The server did not take this (HTTP ${status}).`;
}

function when(seconds) {
  if (seconds === null) return "";
  return Number(seconds) === 1 ? "Try again in a second." : `Try again in ${seconds} seconds.`;
}
