// A spoken conversation of three turns through OpenAI's client, by chat completions and by realtime, as its
// documentation has it.
//
//   node converse.mjs BASE_URL API_KEY MODEL     prints one JSON object of what it heard

import net from "node:net";

import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const SECONDS = [1, 2, 0.5];
const RATE = 24_000;

function tone(seconds) {
  const pcm = Buffer.alloc(2 * seconds * RATE);
  for (let i = 0; i < seconds * RATE; i++) pcm.writeInt16LE(Math.round(9000 * Math.sin((2 * Math.PI * 200 * i) / RATE)), 2 * i);
  return pcm;
}

function wav(pcm) {
  const head = Buffer.alloc(44);
  head.write("RIFF", 0);
  head.writeUInt32LE(36 + pcm.length, 4);
  head.write("WAVEfmt ", 8);
  head.writeUInt32LE(16, 16);
  head.writeUInt16LE(1, 20);
  head.writeUInt16LE(1, 22);
  head.writeUInt32LE(RATE, 24);
  head.writeUInt32LE(2 * RATE, 28);
  head.writeUInt16LE(2, 32);
  head.writeUInt16LE(16, 34);
  head.write("data", 36);
  head.writeUInt32LE(pcm.length, 40);
  return Buffer.concat([head, pcm]);
}

async function chat() {
  const messages = [{ role: "system", content: "Be brief." }];
  const turns = [];
  for (const seconds of SECONDS) {
    const input_audio = { data: wav(tone(seconds)).toString("base64"), format: "wav" };
    messages.push({ role: "user", content: [{ type: "input_audio", input_audio }] });
    const answer = await client.chat.completions.create({
      model,
      messages,
      modalities: ["text", "audio"],
      audio: { voice: "alloy", format: "wav" },
      temperature: 0,
      max_completion_tokens: 60,
    });
    const { audio } = answer.choices[0].message;
    messages.push({ role: "assistant", audio: { id: audio.id } });
    turns.push({ text: audio.transcript, bytes: Buffer.from(audio.data, "base64").length, usage: answer.usage });
  }
  return turns;
}

function realtime() {
  return new Promise((resolve, reject) => {
    // The client connects by TLS alone, which a proxy in front of the server ends. There is none here.
    const createConnection = ({ host, port }) => net.connect({ host, port });
    const rt = new OpenAIRealtimeWS({ model, options: { createConnection } }, client);
    const turns = [];
    let text = "";
    let bytes = 0;
    const say = () => {
      const pcm = tone(SECONDS[turns.length]);
      for (let at = 0; at < pcm.length; at += 9600) {
        rt.send({ type: "input_audio_buffer.append", audio: pcm.subarray(at, at + 9600).toString("base64") });
      }
      rt.send({ type: "input_audio_buffer.commit" });
      rt.send({ type: "response.create" });
    };
    rt.on("error", reject);
    rt.on("session.created", () => {
      const audio = { input: { turn_detection: null }, output: { voice: "marin" } };
      rt.send({ type: "session.update", session: { type: "realtime", instructions: "Be brief.", audio, max_output_tokens: 60, temperature: 0 } });
    });
    rt.on("session.updated", say);
    rt.on("response.output_audio_transcript.delta", (event) => (text += event.delta));
    rt.on("response.output_audio.delta", (event) => (bytes += Buffer.from(event.delta, "base64").length));
    rt.on("response.done", ({ response }) => {
      turns.push({ text, bytes, status: response.status, usage: response.usage });
      [text, bytes] = ["", 0];
      if (turns.length < SECONDS.length) return say();
      rt.close();
      resolve(turns);
    });
  });
}

console.log(JSON.stringify({ chat: await chat(), realtime: await realtime() }));
