/** The server's routes. Addresses are relative, so the page also works below a prefix of a proxy. */

const ROOT = new URL(".", document.baseURI);
const KEY = "api key";
const AWAY = ["engine_not_ready", "engine_stopped", "stopping"];

export const SPEECH_URL = new URL("v1/audio/speech", ROOT).href;
export const BASE_URL = new URL("v1", ROOT).href;

/** An answer that is none. `param`: the field it is about; status 0: the connection failed. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code });
  }

  /** Whether it is the server that is not there, and not the request that is wrong. */
  get isAway() {
    return this.status === 0 || AWAY.includes(this.code);
  }
}

/** For this tab alone: the key is not kept when it is closed. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

async function ask(path, { headers = {}, ...options } = {}) {
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), { headers, ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  const { status } = answer;
  try {
    const { message, param, code } = (await answer.json()).error;
    return new ApiError(message, { status, param, code });
  } catch {
    return new ApiError(`The server answers with status ${status}, and not in words.`, { status });
  }
}

/** How far the server is: {state, progress, detail}. 503 says so too, which is no error here. */
export async function readiness() {
  try {
    return await (await fetch(new URL("ready", ROOT))).json();
  } catch {
    return { state: "away", progress: 0, detail: "the server does not answer" };
  }
}

export async function listed(path) {
  return (await (await ask(path)).json()).data;
}

/**
 * Speak: yields {type: "start", sampleRate}, then {type: "audio", samples} (Float32Array) as it is made and {type: "text", text}, and
 * at the end {type: "done", usage}. Throws ApiError. Whatever else carries speech, such as a socket, may yield the same.
 */
export async function* speech(body, signal) {
  const answer = await ask("v1/audio/speech", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, response_format: "pcm", stream_format: "sse" }),
    signal,
  });
  yield { type: "start", sampleRate: Number(answer.headers.get("x-sample-rate")) };
  const read = sampleReader();
  for await (const event of events(answer.body)) {
    switch (event.type) {
      case "speech.audio.delta":
        yield { type: "audio", samples: read(event.audio) };
        break;
      case "speech.text.delta":
        yield { type: "text", text: event.delta };
        break;
      case "speech.audio.done":
        yield { type: "done", usage: event.usage };
        return;
      case "error":
        throw new ApiError(event.error.message, { status: 200, ...event.error });
    }
  }
  throw cut();
}

const cut = () => new ApiError("The connection broke: this is not the whole answer.");

/** Server-sent events, each the JSON of its data. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : cut();
    });
    if (done) return;
    const whole = (text + value).split("\n\n");
    text = whole.pop();
    for (const event of whole) yield JSON.parse(event.replace(/^data: /, ""));
  }
}

/** Base64 of int16 -> samples; a sample may be cut in two. */
function sampleReader() {
  let rest = "";
  return (base64) => {
    const bytes = rest + atob(base64);
    const samples = new Float32Array(bytes.length >> 1);
    for (let i = 0; i < samples.length; i++) {
      const word = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
      samples[i] = ((word << 16) >> 16) / 32768;
    }
    rest = bytes.slice(2 * samples.length);
    return samples;
  };
}
