// One reply: asked for, received, timed. It changes the message it is given; the page shows what it then is.

import { ApiFailure, streamChat } from "./api.js";
import { sent } from "./room.js";

/**
 * Fill `reply` from the server until it is complete, failed or stopped. Nothing is thrown: what went wrong is in
 * `reply.error`. `changed` is called whenever there is more to show.
 */
export async function receiveReply(reply, { messages, model, sampling, signal, changed }) {
  const started = performance.now();
  let first = null;
  const body = {
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...sampling,
  };
  try {
    for await (const chunk of streamChat(body, signal)) {
      const now = performance.now();
      const choice = chunk.choices[0];
      const text = choice?.delta.content ?? "";
      const reasoning = choice?.delta.reasoning_content ?? "";
      if (first === null && (text || reasoning)) {
        first = { at: now, tokens: chunk.usage?.completion_tokens ?? 1 };
        reply.stats.ttft = now - started;
      }
      reply.content += text;
      if (reasoning) reply.reasoning = (reply.reasoning ?? "") + reasoning;
      if (choice?.finish_reason) reply.stats.finish = choice.finish_reason;
      if (chunk.usage) {
        reply.stats.tokens = chunk.usage.completion_tokens;
        reply.stats.all = chunk.usage.prompt_tokens + chunk.usage.completion_tokens;
      }
      // The last chunk carries the sum and no token, so it says nothing about speed.
      if (choice && first && chunk.usage && now > first.at) {
        reply.stats.rate = ((chunk.usage.completion_tokens - first.tokens) * 1000) / (now - first.at);
      }
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") reply.stopped = true;
    else if (error instanceof ApiFailure) reply.error = { status: error.status, code: error.code, param: error.param, message: error.message };
    else reply.error = { status: 0, message: `The reply could not be read: ${error.message}` };
  }
  const characters = messages.reduce((sum, { content }) => sum + content.length, reply.content.length + (reply.reasoning ?? "").length);
  if (reply.stats.all) reply.stats.tokensPerCharacter = reply.stats.all / characters;
}

/** What is sent of a conversation, as the API takes it: the system prompt, then what was said; failed and empty replies are left out. */
export function asMessages(conversation) {
  const said = sent(conversation).filter((message) => message.content).map(({ role, content }) => ({ role, content }));
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...said] : said;
}
