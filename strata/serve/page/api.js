// The server's API as the pages use it: the key on every request, errors as exceptions, streams of chunks.

import { eventData } from "./sse.js";
import { OF_TAB, drop, keep, kept } from "./storage.js";
import { inPlainWords } from "./words.js";

const KEY = "strata.key";
const IN_A_HEADER = /^[!-~]*$/;

/** The key of this tab. Without one the browser sends what it was asked for when the page was opened, if anything. */
export const key = {
  value: kept(KEY, OF_TAB) ?? "", // held here, too, for a browser that keeps nothing
  get() {
    return this.value;
  },
  set(value) {
    this.value = value;
    if (value) keep(KEY, value, OF_TAB);
    else drop(KEY, OF_TAB);
  },
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
  if (!IN_A_HEADER.test(key.get())) throw new ApiFailure(401, "The key is wrong: keys have no spaces and no letters of other alphabets.");
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, { method, headers, body: sent, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure(0, "The server does not answer. Is it running?");
  }
  if (!response.ok) throw await failure(response, sent);
  return response;
}

async function failure(response, sent) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // no JSON: the status has to do
  }
  return asFailure(response.status, told, { wait: response.headers.get("retry-after"), sent });
}

/** told: what the answer says, of which only words are taken: it may be that of a proxy before the server. */
function asFailure(status, told, { wait = null, sent = "" } = {}) {
  const [code, param, message] = [told.code, told.param, told.message].map((value) => (typeof value === "string" ? value : null));
  const bytes = new Blob([sent]).size;
  return new ApiFailure(status, inPlainWords({ status, code, param, message }, { hasKey: key.get() !== "", wait, bytes }), { code, param });
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
