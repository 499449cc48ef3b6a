// OpenAI's client in front of a server: what a program of its documentation does, with its names for model and voice.
//
//   node speak.mjs BASE_URL API_KEY     prints one JSON object of what it heard; audio in base64

import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const ASKED = { model: "tts-1", voice: "alloy", input: "Good morning, everybody." };
const BRIEF = { seed: 1, max_new_tokens: 12 };

const base64 = (bytes) => Buffer.from(bytes).toString("base64");

async function streamed(fields) {
  const answer = await client.audio.speech.create({ ...ASKED, ...BRIEF, ...fields });
  const chunks = [];
  for await (const chunk of answer.body) chunks.push(chunk);
  return {
    type: answer.headers.get("content-type"),
    rate: Number(answer.headers.get("x-sample-rate")),
    warning: answer.headers.get("x-warning"),
    requestId: answer.headers.get("x-request-id"),
    length: answer.headers.get("content-length"),
    num_chunks: chunks.length,
    audio: base64(Buffer.concat(chunks)),
  };
}

async function whole(fields) {
  const answer = await client.audio.speech.create({ ...ASKED, ...BRIEF, stream: false, ...fields });
  return { length: answer.headers.get("content-length"), audio: base64(await answer.arrayBuffer()) };
}

async function events() {
  const answer = await client.audio.speech.create({ ...ASKED, ...BRIEF, response_format: "pcm", stream_format: "sse" });
  const lines = (await answer.text()).split("\n").filter((line) => line.startsWith("data: "));
  return lines.map((line) => JSON.parse(line.slice(6)));
}

// Leaves in the midst of a long answer; the next one finds its place free.
async function left() {
  const leave = new AbortController();
  const fields = { ...ASKED, seed: 1, response_format: "pcm", input: "And so it went on. ".repeat(20) };
  const answer = await client.audio.speech.create(fields, { signal: leave.signal });
  let heard = 0;
  try {
    for await (const chunk of answer.body) {
      heard += chunk.length;
      leave.abort();
    }
  } catch (error) {
    return { heard, error: error.name };
  }
  return { heard, error: null };
}

async function refused(fields) {
  try {
    await client.audio.speech.create({ ...ASKED, ...fields });
  } catch (error) {
    const { status, message, param, code, type } = error;
    return { class: error.constructor.name, status, message, param, code, type, requestID: error.requestID };
  }
  return null;
}

const heard = {
  models: (await client.models.list()).data.map((model) => model.id),
  pcm: await streamed({ response_format: "pcm" }),
  mp3: await streamed({}),
  wav: await whole({ response_format: "wav" }),
  whole: await whole({ response_format: "pcm" }),
  events: await events(),
  left: await left(),
  afterwards: await streamed({ response_format: "pcm" }),
  empty: await refused({ input: "" }),
  format: await refused({ response_format: "midi" }),
  key: await new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list().catch((error) => error.constructor.name),
};
console.log(JSON.stringify(heard));
