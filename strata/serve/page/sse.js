// Server-sent events from a response body (WHATWG HTML, 9.2.6): the data of each event, as it arrives.

/** Yields the data of every event. What follows the last blank line was never finished, and is dropped. */
export async function* eventData(body) {
  let data = [];
  for await (const line of lines(body)) {
    if (line === "") {
      if (data.length) yield data.join("\n");
      data = [];
    } else if (line === "data" || line.startsWith("data:")) {
      data.push(line.slice(5).replace(/^ /, ""));
    } // other fields and comments say nothing to us
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      // A carriage return at the end may be the first half of a line end.
      const complete = rest.endsWith("\r") ? rest.slice(0, -1) : rest;
      const parts = complete.split(/\r\n|\r|\n/);
      rest = parts.pop() + rest.slice(complete.length);
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {}); // the stream may be broken already
  }
}
