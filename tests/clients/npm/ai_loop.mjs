// The AI SDK: a conversation, a tool round trip, streams, structured output. Takes a URL.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "strata",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = provider("scripted");
const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => a + b,
});
const person = Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) });
const user = (content) => ({ role: "user", content });

async function generated(options) {
  const { text, response } = await generateText({ model, maxRetries: 0, ...options });
  return { text, messages: response.messages };
}

async function streamed(options) {
  const result = streamText({ model, maxRetries: 0, onError: ({ error }) => assert.fail(error), ...options });
  let text = "";
  for await (const part of result.textStream) text += part;
  return { text, messages: (await result.response).messages };
}

for (const answer of [generated, streamed]) {
  const first = await answer({ messages: [user("Hello")] });
  assert.equal(first.text, "This is turn 1.");
  const second = await answer({ messages: [user("Hello"), ...first.messages, user("And again")] });
  assert.equal(second.text, "This is turn 2.");

  const tools = { add };
  const call = await answer({ messages: [user("Add 2 and 3")], tools, stopWhen: stepCountIs(3) });
  assert.ok(call.text.endsWith("The sum is 5."), call.text);
  const after = await answer({ messages: [user("Add 2 and 3"), ...call.messages, user("And again")] });
  assert.equal(after.text, "This is turn 2.");
}
const { output } = await generateText({ model, output: person, messages: [user("Who?")], maxRetries: 0 });
assert.deepEqual(output, { name: "Ann", age: 30 });
