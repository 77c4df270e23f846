// The server's API as the pages use it: the key on every request, errors as exceptions, streams of chunks.

import { eventData } from "./sse.js";

const KEY = "strata.key";

/** The key of this tab. Without one the browser sends what it was asked for when the page was opened, if anything. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** A request that failed: status is that of HTTP, 0 if there was no answer. */
export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
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
  let message = `The server answered with ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON: the status has to do
  }
  const wait = response.headers.get("retry-after");
  return new ApiFailure(response.status, wait ? `${message} (again in ${wait} s)` : message);
}

/** The chunks of a streamed chat completion. Throws ApiFailure if the server reports an error or the stream is cut. */
export async function* streamChat(body, signal) {
  const response = await request("/v1/chat/completions", { method: "POST", body, signal });
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiFailure(response.status, chunk.error.message);
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
