// The server's API as the pages use it: the key on every request, errors as exceptions, streams of chunks.

import { eventData } from "./sse.js";
import { inPlainWords } from "./words.js";

const KEY = "strata.key";

/** The key of this tab. Without one the browser sends what it was asked for when the page was opened, if anything. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/**
 * A request that failed, with a message for people. status: that of HTTP, 0 if there was no answer. code: the API's word
 * for it, if there is one. param: the field at fault, if there is one.
 */
export class ApiFailure extends Error {
  constructor(status, message, { code = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** fetch with the key; throws ApiFailure for no answer and for every status that is no success. */
export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure(0, "The server does not answer. Is it running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // no JSON: the status has to do
  }
  return asFailure(response.status, told, response.headers.get("retry-after"));
}

function asFailure(status, told, wait = null) {
  return new ApiFailure(status, inPlainWords({ status, ...told }, { hasKey: key.get() !== "", wait }), told);
}

/** The chunks of a streamed chat completion. Throws ApiFailure if the server reports an error or the stream is cut. */
export async function* streamChat(body, signal) {
  const response = await request("/v1/chat/completions", { method: "POST", body, signal });
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw asFailure(response.status, chunk.error);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiFailure) throw error;
    throw new ApiFailure(0, "The connection was lost before the reply was complete.");
  }
  throw new ApiFailure(0, "The connection was lost before the reply was complete.");
}

/** {id, max_model_len} of the model that is served. */
export async function servedModel() {
  return (await (await request("/v1/models")).json()).data[0];
}
