// OpenAI's JavaScript client against a running server: every endpoint and field, streamed and not.
// STRATA_URL and STRATA_KEY say where. The model is the built-in one, which is greedy unless told otherwise.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const url = process.env.STRATA_URL;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.STRATA_KEY, maxRetries: 0 });
const model = "builtin";
const messages = [{ role: "user", content: "What is 47 + 38?" }];
const story = [{ role: "user", content: "Tell me a story." }];
const weather = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const chatTool = { type: "function", function: { name: "get_weather", description: "Forecast.", parameters: weather } };
const responseTool = { type: "function", name: "get_weather", parameters: weather, strict: true };

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

function content(chunks, index = 0) {
  const own = chunks.flatMap((chunk) => chunk.choices).filter((choice) => choice.index === index);
  return own.map((choice) => choice.delta.content ?? "").join("");
}

async function post(path, body) {
  const headers = { "content-type": "application/json", authorization: `Bearer ${process.env.STRATA_KEY}` };
  const response = await fetch(`${url}${path}`, { method: "POST", headers, body: JSON.stringify(body) });
  assert.equal(response.status, 200);
  return response.json();
}

function checkWeather(text) {
  const given = JSON.parse(text);
  assert.deepEqual(Object.keys(given).sort(), ["city", "days"]);
  assert.ok(["Oslo", "Rome"].includes(given.city));
  assert.ok(Number.isInteger(given.days) && given.days >= 1 && given.days <= 9);
}

test("models", async () => {
  const models = await all(client.models.list());
  assert.deepEqual(models.map((one) => one.id), [model]);
  assert.equal((await client.models.retrieve(model)).max_model_len, 1024);
});

test("chat: whole and streamed are the same", async () => {
  const { data: whole, request_id } = await client.chat.completions.create({ model, messages }).withResponse();
  assert.ok(request_id);
  const [choice] = whole.choices;
  assert.ok(choice.message.content.endsWith("Answer: 85"));
  assert.equal(choice.message.role, "assistant");
  assert.equal(choice.finish_reason, "stop");
  const options = { include_usage: true };
  const chunks = await all(await client.chat.completions.create({ model, messages, stream: true, stream_options: options }));
  assert.equal(content(chunks), choice.message.content);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(chunks.at(-2).choices[0].finish_reason, "stop");
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.deepEqual(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
  assert.ok(chunks.slice(0, -1).every((chunk) => chunk.usage === null && chunk.id === chunks[0].id));
  const helper = client.chat.completions.stream({ model, messages });
  assert.equal(await helper.finalContent(), choice.message.content);
});

test("chat: sampling fields", async () => {
  const asked = {
    model, messages: story, n: 3, seed: 7, temperature: 1.5, top_p: 0.95, max_completion_tokens: 12,
    frequency_penalty: 0.5, presence_penalty: 0.5, logprobs: true, top_logprobs: 2, logit_bias: { 5: -100 },
    user: "u", top_k: 50, min_p: 0.01, repetition_penalty: 1.1, ignore_eos: true, min_tokens: 12,
  };
  const whole = await client.chat.completions.create(asked);
  const again = await all(await client.chat.completions.create({ ...asked, stream: true }));
  assert.equal(whole.choices.length, 3);
  for (const { index, message, logprobs, finish_reason } of whole.choices) {
    assert.equal(content(again, index), message.content);
    assert.equal(finish_reason, "length");
    assert.equal(logprobs.content.length, 12);
    assert.ok(logprobs.content.every((one) => one.logprob <= 0 && one.top_logprobs.length === 2));
    const streamed = again.flatMap((chunk) => chunk.choices).filter((choice) => choice.index === index);
    assert.equal(streamed.flatMap((choice) => choice.logprobs?.content ?? []).length, 12);
  }
  assert.equal(whole.usage.completion_tokens, 36);
  assert.ok(new Set(whole.choices.map((choice) => choice.message.content)).size > 1);
});

test("chat: stop", async () => {
  const whole = await client.chat.completions.create({ model, messages, stop: ["write 5", "never"] });
  assert.ok(whole.choices[0].message.content.endsWith(", "));
  assert.equal(whole.choices[0].finish_reason, "stop");
  const chunks = await all(await client.chat.completions.create({ model, messages, stop: "write 5", stream: true }));
  assert.equal(content(chunks), whole.choices[0].message.content);
});

test("chat: response_format", async () => {
  const schema = { type: "json_schema", json_schema: { name: "weather", strict: true, schema: weather } };
  const whole = await client.chat.completions.create({ model, messages, response_format: schema });
  checkWeather(whole.choices[0].message.content);
  const chunks = await all(await client.chat.completions.create({ model, messages, response_format: schema, stream: true }));
  checkWeather(content(chunks));
  const parsed = await client.chat.completions.parse({ model, messages, response_format: schema });
  checkWeather(JSON.stringify(parsed.choices[0].message.parsed));
});

for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
  test(`chat: tools, ${typeof tool_choice === "string" ? tool_choice : "named"}`, async () => {
    const asked = { model, messages, tools: [chatTool], tool_choice, parallel_tool_calls: false };
    const whole = await client.chat.completions.create(asked);
    const [call] = whole.choices[0].message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    assert.match(call.id, /^call_/);
    checkWeather(call.function.arguments);
    const helper = client.chat.completions.stream(asked);
    const names = [];
    helper.on("tool_calls.function.arguments.done", ({ name }) => names.push(name));
    const streamed = await helper.finalChatCompletion();
    assert.deepEqual(names, ["get_weather"]);
    assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  });
}

test("chat: tools, auto and none", async () => {
  for (const tool_choice of ["none", undefined]) {
    // A forecast is of no use for this.
    const whole = await client.chat.completions.create({ model, messages, tools: [chatTool], tool_choice });
    assert.ok(whole.choices[0].message.content.endsWith("Answer: 85"));
    assert.equal(whole.choices[0].message.tool_calls, undefined);
  }
});

test("completions", async () => {
  const asked = { model, prompt: ["Once upon", "The"], max_tokens: 8, n: 2, echo: true, logprobs: 2, seed: 3, temperature: 1 };
  const whole = await client.completions.create(asked);
  assert.equal(whole.choices.length, 4);
  assert.ok(whole.choices[0].text.startsWith("Once upon") && whole.choices[3].text.startsWith("The"));
  for (const { text, logprobs } of whole.choices) {
    assert.equal(logprobs.tokens.length, logprobs.text_offset.length);
    assert.equal(logprobs.token_logprobs[0], null);
    assert.ok(logprobs.tokens.join("").includes(text));
  }
  const chunks = await all(await client.completions.create({ ...asked, stream: true }));
  for (const { index, text } of whole.choices) {
    const own = chunks.flatMap((chunk) => chunk.choices).filter((choice) => choice.index === index);
    assert.equal(own.map((choice) => choice.text).join(""), text);
  }
  await assert.rejects(client.completions.create({ model, prompt: "a", suffix: "b" }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "suffix");
    return true;
  });
});

test("responses: whole and streamed are the same", async () => {
  const asked = { model, input: messages[0].content, instructions: "Be brief.", metadata: { a: "b" } };
  const whole = await client.responses.create(asked);
  assert.equal(whole.status, "completed");
  assert.deepEqual(whole.metadata, { a: "b" });
  const events = await all(await client.responses.create({ ...asked, stream: true }));
  assert.equal(events[0].type, "response.created");
  assert.equal(events.at(-1).type, "response.completed");
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, number) => number));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  const final = await client.responses.stream(asked).finalResponse();
  assert.equal(final.output_text, whole.output_text);
});

test("responses: kept, gone on from, and forgotten", async () => {
  const first = await client.responses.create({ model, input: messages[0].content });
  const second = await client.responses.create({ model, input: "And 3 + 4?", previous_response_id: first.id });
  assert.equal(second.previous_response_id, first.id);
  assert.ok(second.usage.input_tokens > first.usage.total_tokens);
  assert.equal((await client.responses.retrieve(second.id)).output_text, second.output_text);
  await client.responses.delete(second.id);
  await assert.rejects(client.responses.retrieve(second.id), OpenAI.NotFoundError);
  const asked = { model, input: "a", previous_response_id: second.id };
  await assert.rejects(client.responses.create(asked), OpenAI.NotFoundError);
});

test("responses: cut off", async () => {
  const whole = await client.responses.create({ model, input: messages, max_output_tokens: 3, store: false });
  assert.equal(whole.status, "incomplete");
  assert.equal(whole.incomplete_details.reason, "max_output_tokens");
  assert.equal(whole.usage.output_tokens, 3);
});

test("responses: formats and log-probabilities", async () => {
  const format = { type: "json_schema", name: "weather", schema: weather, strict: true };
  checkWeather((await client.responses.create({ model, input: "Oslo?", text: { format } })).output_text);
  const include = ["message.output_text.logprobs"];
  const whole = await client.responses.create({ model, input: "Hello", include, top_logprobs: 2, max_output_tokens: 4 });
  assert.equal(whole.output[0].content[0].logprobs.length, 4);
});

test("responses: tools", async () => {
  const asked = { model, input: "Oslo?", tools: [responseTool], tool_choice: "required", parallel_tool_calls: false };
  const whole = await client.responses.create(asked);
  const [call] = whole.output;
  assert.equal(call.type, "function_call");
  checkWeather(call.arguments);
  const events = await all(await client.responses.create({ ...asked, stream: true }));
  const deltas = events.filter((event) => event.type === "response.function_call_arguments.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), call.arguments);
  const done = events.find((event) => event.type === "response.function_call_arguments.done");
  assert.equal(done.arguments, call.arguments);
});

test("embeddings", async () => {
  const input = ["What is 47 + 38?", "Reverse the word planet."];
  const packed = await client.embeddings.create({ model, input });
  const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
  assert.equal(packed.data.length, 2);
  for (const [index, { embedding }] of packed.data.entries()) {
    const length = Math.hypot(...embedding);
    assert.ok(Math.abs(length - 1) < 1e-3, `length ${length}`);
    // Of several prompts as many as have come run in one step, and bfloat16 rounds by how many rows it has.
    embedding.forEach((value, place) => assert.ok(Math.abs(value - plain.data[index].embedding[place]) < 5e-3));
  }
  const mean = await client.embeddings.create({ model, input: [[5, 6, 7]], pooling: "mean", encoding_format: "float" });
  const last = await client.embeddings.create({ model, input: [5, 6, 7], encoding_format: "float" });
  const [{ embedding: alone }] = (await client.embeddings.create({ model, input: [5, 6, 7] })).data;
  alone.forEach((value, place) => assert.ok(Math.abs(value - last.data[0].embedding[place]) < 1e-6));
  assert.notDeepEqual(mean.data[0].embedding, last.data[0].embedding);
  assert.equal(mean.usage.prompt_tokens, 3);
});

test("tokens there and back", async () => {
  const { tokens, count, max_model_len } = await post("/tokenize", { prompt: "Größe 🙂", add_special_tokens: false });
  assert.equal(tokens.length, count);
  assert.equal(max_model_len, 1024);
  assert.deepEqual(await post("/detokenize", { tokens }), { prompt: "Größe 🙂" });
  const chat = await post("/tokenize", { messages });
  const asked = await client.chat.completions.create({ model, messages, max_completion_tokens: 1 });
  assert.equal(chat.count, asked.usage.prompt_tokens);
});

test("errors have their class, field and code", async () => {
  const expected = [
    [{ model: "gpt", messages }, OpenAI.NotFoundError, "model", "model_not_found"],
    [{ model, messages: [] }, OpenAI.BadRequestError, "messages"],
    [{ model, messages, n: 17 }, OpenAI.BadRequestError, "n"],
    [{ model, messages, top_logprobs: 21, logprobs: true }, OpenAI.BadRequestError, "top_logprobs"],
    [{ model, messages, modalities: ["audio"] }, OpenAI.BadRequestError, "modalities"],
    [{ model, messages, max_completion_tokens: 5000 }, OpenAI.BadRequestError, "max_tokens", "context_length_exceeded"],
  ];
  for (const [asked, kind, param, code] of expected) {
    for (const stream of [false, true]) {
      await assert.rejects(client.chat.completions.create({ ...asked, stream }), (error) => {
        assert.ok(error instanceof kind, String(error));
        assert.equal(error.param, param);
        if (code) assert.equal(error.code, code);
        return true;
      });
    }
  }
  const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
});

test("a stream that is left ends at the server", async () => {
  const headers = { authorization: `Bearer ${process.env.STRATA_KEY}` };
  const read = async () => (await fetch(`${url}/metrics`, { headers })).text();
  const aborts = (text) => Number(/^strata_aborts_total\{.*\} (\S+)$/m.exec(text)[1]);
  const before = aborts(await read());
  const asked = { model, messages, stream: true, ignore_eos: true, max_completion_tokens: 900 };
  for await (const chunk of await client.chat.completions.create(asked)) {
    if (chunk.choices[0]?.delta.content) break;
  }
  const started = performance.now();
  for (;;) {
    const metrics = await read();
    if (aborts(metrics) > before && /^strata_num_requests_running\{.*\} 0(\.0)?$/m.test(metrics)) break;
    assert.ok(performance.now() - started < 60_000, "it still runs, or came to its end");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
});
