/** A conversation with a model that answers, over WS v1/realtime: hold to talk, hear the answer, interrupt it. */

import { key, realtimeUrl, sampleReader } from "./api.js";
import { Player } from "./player.js";

const RATE_HZ = 24_000;
const CHUNK = 4800; // samples of a message, 0.2 s
const FULL_SCALE = 32767;
const $ = (id) => document.getElementById(id);

export class Talk {
  /** `form`: the settings. `contextOf`: returns the AudioContext of a sample rate. */
  constructor(form, contextOf) {
    Object.assign(this, { form, contextOf });
    this.socket = this.model = this.answer = this.microphone = null;
    this.isHeld = false;
    const hold = $("hold");
    hold.addEventListener("pointerdown", () => this.begin());
    for (const end of ["pointerup", "pointercancel", "pointerleave", "blur"]) hold.addEventListener(end, () => this.end());
    hold.addEventListener("keydown", (event) => this.#onKey(event, () => this.begin()));
    hold.addEventListener("keyup", (event) => this.#onKey(event, () => this.end()));
    $("interrupt").addEventListener("click", () => this.interrupt());
    $("anew").addEventListener("click", () => this.reset());
    $("send").addEventListener("click", () => this.write());
    $("said").addEventListener("keydown", (event) => event.key === "Enter" && !event.isComposing && this.write());
    $("no-talking").hidden = Boolean(navigator.mediaDevices);
    hold.disabled = !navigator.mediaDevices;
  }

  /** Shows the conversation in place of speech if the model answers, and does not perform what a text asks for. */
  show(model) {
    const answers = model.answers && !model.performs;
    $("talk").hidden = !answers;
    $("speech").hidden = $("request-code").hidden = $("more").hidden = answers;
    if (model.id !== this.model) this.reset();
    this.model = model.id;
  }

  #onKey(event, act) {
    if (event.key !== " " || event.repeat) return;
    event.preventDefault();
    act();
  }

  /** Returns the open connection to the session. It is opened by the first turn. */
  async #connected() {
    this.socket ??= this.#open();
    const socket = await this.socket;
    socket.tell("session.update", {
      session: {
        type: "realtime",
        instructions: $("instructions").value,
        audio: { input: { turn_detection: null } },
      },
    });
    return socket;
  }

  #open() {
    const protocols = ["realtime", ...(key.get() ? [`openai-insecure-api-key.${key.get()}`] : [])];
    const socket = new WebSocket(realtimeUrl(this.model), protocols);
    socket.tell = (type, fields = {}) => socket.send(JSON.stringify({ type, ...fields }));
    socket.onmessage = ({ data }) => this.#take(JSON.parse(data));
    return new Promise((resolve, reject) => {
      socket.onopen = () => resolve(socket);
      socket.onclose = ({ reason }) => {
        this.#lost(reason);
        reject(new Error(reason));
      };
    });
  }

  #lost(reason) {
    if (!this.socket) return;
    this.socket = null;
    this.#stopPlaying();
    this.#problem(`The conversation has ended: ${reason || "the connection was lost"}. The next turn begins a new one.`);
  }

  /** Begins a spoken turn, and interrupts the answer. */
  async begin() {
    if (this.isHeld) return;
    this.isHeld = true;
    this.#problem("");
    this.interrupt();
    $("hold").classList.add("is-speaking");
    $("hold").textContent = "Release to send";
    const context = this.contextOf(RATE_HZ); // within the press, because browsers allow sound only after one
    try {
      const socket = await this.#connected();
      const microphone = new Microphone(context, (audio) => socket.tell("input_audio_buffer.append", { audio }));
      await microphone.start();
      this.microphone = microphone;
      if (!this.isHeld) this.#send(); // it was released in the meantime
    } catch (error) {
      this.end();
      if (this.socket) this.#problem(`The microphone is not available: ${error.message}`);
    }
  }

  /** Ends the spoken turn, which is then answered. */
  end() {
    if (!this.isHeld) return;
    this.isHeld = false;
    $("hold").classList.remove("is-speaking");
    $("hold").textContent = "Hold to talk";
    if (this.microphone) this.#send();
  }

  async #send() {
    const { microphone } = this;
    this.microphone = null;
    const lengthS = microphone.stop();
    const socket = await this.socket;
    if (lengthS < 0.1) return socket.tell("input_audio_buffer.clear");
    this.#turn("user", `${lengthS.toFixed(1)} s of speech`);
    socket.tell("input_audio_buffer.commit");
    this.#ask(socket);
  }

  /** Sends the typed turn. */
  async write() {
    const text = $("said").value.trim();
    if (!text) return;
    this.contextOf(RATE_HZ);
    this.#problem("");
    this.interrupt();
    $("said").value = "";
    try {
      const socket = await this.#connected();
      this.#turn("user", text);
      const content = [{ type: "input_text", text }];
      socket.tell("conversation.item.create", { item: { type: "message", role: "user", content } });
      this.#ask(socket);
    } catch {
      // the reason is shown already
    }
  }

  #ask(socket) {
    const context = this.contextOf(RATE_HZ);
    const answer = (this.answer = { id: null, isComing: true, length: 0, read: sampleReader(), line: null });
    answer.player = new Player(context, RATE_HZ, () => this.#showInterrupt());
    socket.tell("response.create");
    this.#showInterrupt();
  }

  /** Stops the answer, and tells the server what was heard of it. */
  async interrupt() {
    const { answer } = this;
    if (!answer || !this.isAnswering) return;
    const heardS = Math.min(answer.player.positionS, answer.length / RATE_HZ);
    this.#stopPlaying();
    const socket = await this.socket;
    if (answer.isComing) socket.tell("response.cancel");
    answer.isComing = false;
    if (!answer.id) return;
    const audio_end_ms = Math.floor(1000 * heardS);
    socket.tell("conversation.item.truncate", { item_id: answer.id, content_index: 0, audio_end_ms });
    answer.line.classList.add("is-cut");
  }

  #stopPlaying() {
    this.answer?.player.stop();
    if (this.answer) this.answer.isStopped = true;
    this.#showInterrupt();
  }

  /** Whether an answer is arriving or playing. */
  get isAnswering() {
    const { answer } = this;
    return Boolean(answer && !answer.isStopped && (answer.isComing || answer.player.sources.size));
  }

  #take(event) {
    const { answer } = this;
    switch (event.type) {
      case "response.output_item.added":
        answer.id = event.item.id;
        answer.line = this.#turn("assistant", "");
        break;
      case "response.output_audio_transcript.delta":
        if (event.item_id === answer.id) answer.line.textContent += event.delta;
        break;
      case "response.output_audio.delta": {
        if (event.item_id !== answer.id || answer.isStopped) break;
        const samples = answer.read(event.delta);
        answer.length += samples.length;
        answer.player.push(samples);
        break;
      }
      case "response.done":
        this.#done(event.response);
        break;
      case "error":
        if (event.error.code !== "response_cancel_not_active") this.#problem(event.error.message); // it has just ended
        break;
    }
    this.#showInterrupt();
  }

  #done(response) {
    const { answer } = this;
    if (response.status === "failed") this.#problem(response.status_details.error.message);
    if (response.status === "cancelled") return; // its successor may be on its way
    answer.isComing = false;
    answer.player.finish();
  }

  #turn(role, text) {
    const line = document.createElement("li");
    line.className = role;
    line.textContent = text;
    $("turns").append(line);
    line.scrollIntoView({ block: "nearest" });
    return line;
  }

  /** Forgets the conversation. */
  async reset() {
    const { socket } = this;
    this.#stopPlaying();
    this.socket = this.answer = null;
    $("turns").replaceChildren();
    this.#problem("");
    (await socket)?.close();
  }

  #showInterrupt() {
    $("interrupt").hidden = !this.isAnswering;
  }

  #problem(text) {
    $("talk-problem").textContent = text;
  }
}

/** Sends what the microphone hears, as base64 of int16. */
class Microphone {
  constructor(context, send) {
    Object.assign(this, { context, send, chunk: [], length: 0 });
  }

  async start() {
    this.stream = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: true } });
    await this.context.audioWorklet.addModule(new URL("playground/capture.js", document.baseURI).href);
    this.source = this.context.createMediaStreamSource(this.stream);
    this.node = new AudioWorkletNode(this.context, "capture", { numberOfOutputs: 0 });
    this.node.port.onmessage = ({ data }) => this.#take(data);
    this.source.connect(this.node);
  }

  #take(samples) {
    for (const sample of samples) this.chunk.push(sample);
    this.length += samples.length;
    if (this.chunk.length >= CHUNK) this.#flush();
  }

  #flush() {
    if (!this.chunk.length) return;
    const words = Int16Array.from(this.chunk, (sample) => Math.round(FULL_SCALE * Math.max(-1, Math.min(1, sample))));
    this.chunk = [];
    this.send(btoa(String.fromCharCode(...new Uint8Array(words.buffer))));
  }

  /** Returns the length in seconds. */
  stop() {
    this.source.disconnect();
    this.node.port.onmessage = null;
    this.stream.getTracks().forEach((track) => track.stop());
    this.#flush();
    return this.length / this.context.sampleRate;
  }
}
