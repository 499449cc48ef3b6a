/** The request as a shell command and as a Python program. `reference`: the name of the file with ref_audio. */

import { BASE_URL, SPEECH_URL } from "./api.js";

const OWN = ["model", "voice", "input", "instructions"]; // arguments of OpenAI's client; others go into extra_body

export function curl(body, { reference = null, needsKey = false } = {}) {
  const { ref_audio, ...rest } = { ...body, response_format: "wav" };
  const asked = JSON.stringify(rest, null, 1).replace(/\n */g, " ").replace(/^{ | }$/g, "");
  const headers = ["-H 'content-type: application/json'"];
  if (needsKey) headers.push('-H "authorization: Bearer $ZOO_API_KEY"');
  const command = `curl -N ${quoted(SPEECH_URL)} \\\n  ${headers.join(" \\\n  ")} \\\n  -o speech.wav`;
  if (!reference) return `${command} \\\n  -d ${quoted(`{${asked}}`)}`;
  // The audio is too long for an argument. curl -d drops the line ends of base64.
  const parts = [`printf %s '{"ref_audio": "'`, `base64 < ${quoted(reference)}`, `printf %s ${quoted(`", ${asked}}`)}`];
  return `{\n  ${parts.join("\n  ")}\n} | ${command} -d @-`;
}

export function python(body, { reference = null, needsKey = false } = {}) {
  const extra = Object.entries(body).filter(([name]) => !OWN.includes(name));
  const more = extra.map(([name, value]) => `        ${literal(name)}: ${name === "ref_audio" ? "ref_audio" : literal(value)},\n`);
  const own = OWN.filter((name) => name in body).map((name) => `    ${name}=${literal(body[name])},\n`);
  if (!("voice" in body)) own.push("    voice=openai.omit,\n");
  const imports = [...(reference ? ["import base64"] : []), ...(needsKey ? ["import os"] : [])];
  const apiKey = needsKey ? 'os.environ["ZOO_API_KEY"]' : '"none"';
  return [
    ...imports,
    ...(reference ? ["from pathlib import Path"] : []),
    ...(imports.length ? [""] : []),
    "import openai",
    "",
    ...(reference ? [`ref_audio = base64.b64encode(Path(${literal(reference)}).read_bytes()).decode()`] : []),
    `client = openai.OpenAI(base_url=${literal(BASE_URL)}, api_key=${apiKey})`,
    "with client.audio.speech.with_streaming_response.create(",
    `${own.join("")}    response_format="wav",\n    extra_body={\n${more.join("")}    },`,
    ") as answer:",
    '    answer.stream_to_file("speech.wav")',
  ].join("\n");
}

/** Quotes a text for the shell. */
const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** A Python literal: Python reads JSON's escapes the same way. */
const literal = (value) => (typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value));
