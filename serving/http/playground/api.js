/** The server's routes. Addresses are relative, so the page also works under a path prefix of a proxy. */

const ROOT = new URL(".", document.baseURI);
const KEY = "api key";
const AWAY = ["engine_not_ready", "engine_stopped", "stopping"];

export const SPEECH_URL = new URL("v1/audio/speech", ROOT).href;
export const BASE_URL = new URL("v1", ROOT).href;

/** An error from the server. `param`: the field with the error. status 0: the connection failed. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code });
  }

  /** Whether the server is unavailable, rather than the request wrong. */
  get isAway() {
    return this.status === 0 || AWAY.includes(this.code);
  }
}

/** The API key, kept until this tab is closed. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

/** Sends a request with the key, and returns the answer. Throws ApiError. */
export async function ask(path, { headers = {}, ...options } = {}) {
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), { headers, ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server is not responding.");
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
    return new ApiError(`The server answered with status ${status} and no message.`, { status });
  }
}

/** The server's state: {state, progress, detail}. A server that is not ready answers 503 with it, which is not an error here. */
export async function readiness() {
  try {
    return await (await fetch(new URL("ready", ROOT))).json();
  } catch {
    return { state: "away", progress: 0, detail: "the server is not responding" };
  }
}

/** The states of models on demand by their names, such as {"anna": {state: "cold", progress: 0}}; {} on other servers. */
export async function modelStates() {
  try {
    return (await (await fetch(new URL("health", ROOT))).json()).models ?? {};
  } catch {
    return {};
  }
}

export async function listed(path) {
  return (await (await ask(path)).json()).data;
}

/**
 * Request speech. Yields {type: "start", sampleRate}, {type: "loading", state, progress} while the model is loaded, then {type: "audio", samples} (Float32Array) and {type: "text", text} as they
 * arrive, {type: "words", words} for each piece of the text if `hasWords`, and {type: "done", usage} at the end. Throws ApiError.
 */
export async function* speech(body, signal, { hasWords = false } = {}) {
  const times = hasWords ? { timestamp_granularities: ["word"] } : {};
  const answer = await ask("v1/audio/speech", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, ...times, response_format: "pcm", stream_format: "sse" }),
    signal,
  });
  yield { type: "start", sampleRate: Number(answer.headers.get("x-sample-rate")) };
  const read = sampleReader();
  for await (const event of events(answer.body)) {
    switch (event.type) {
      case "speech.model.loading":
        yield { type: "loading", state: event.state, progress: event.progress };
        break;
      case "speech.audio.delta":
        yield { type: "audio", samples: read(event.audio) };
        break;
      case "speech.text.delta":
        yield { type: "text", text: event.delta };
        break;
      case "speech.audio.words":
        yield { type: "words", words: event.words };
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

const cut = () => new ApiError("The connection was lost, so the answer is incomplete.");

/** Yields server-sent events as objects, parsed from the JSON of their data. */
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

/** The address of a conversation with a model. */
export function realtimeUrl(model) {
  const url = new URL("v1/realtime", ROOT);
  url.protocol = url.protocol.replace("http", "ws");
  url.searchParams.set("model", model);
  return url.href;
}

/** Returns a function that turns base64 of int16 into samples. A sample may be split between two calls. */
export function sampleReader() {
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
