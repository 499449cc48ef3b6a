/** The page: waits for the server, requests speech, and shows the result. */

import { ApiError, key, listed, modelStates, readiness, speech } from "./api.js";
import { curl, python } from "./code.js";
import { Form } from "./form.js";
import { Take } from "./take.js";
import { Talk } from "./talk.js";
import { Wave } from "./wave.js";
import { Words } from "./words.js";
import { Works } from "./works.js";

const POLL_MS = 1000;
const STATES_MS = 3000;
const DOING = {
  waiting: "Waiting for memory",
  loading: "Loading the model",
  warming: "Warming up",
  unloading: "Unloading the model, to load it again",
};
const IS_MAC = navigator.platform.startsWith("Mac");
const $ = (id) => document.getElementById(id);
const wave = new Wave($("wave"));
const words = new Words($("words"));
const form = new Form(onChange);
const talk = new Talk(form, contextOf);
const works = new Works(form);
const page = { take: null, isReady: false, isSpeaking: false, needsKey: Boolean(key.get()) };
page.contexts = new Map(); // AudioContexts, by sample rate
page.talk = talk;
page.works = works;
globalThis.playground = page; // for the console and the tests

function onChange() {
  talk.show(form.model);
  showCode();
}

/** Waits until the server is ready, then lists its models and voices. */
async function connect() {
  page.isReady = false;
  showButton();
  while (true) {
    const { state, progress, detail } = await readiness();
    if (state === "ready") break;
    const doing = DOING[state] ?? "Waiting for the server";
    showWaiting(detail ? `${doing}: ${detail}` : doing, progress);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
  $("waiting").hidden = true;
  try {
    form.fill(await listed("v1/models"), await listed("v1/audio/voices"));
  } catch (error) {
    if (error.status === 401) return askForKey(error);
    if (error.isAway) return setTimeout(connect, POLL_MS);
    throw error;
  }
  $("locked").hidden = true;
  page.isReady = true;
  showButton();
  works.refresh();
  followStates();
}

/** Keeps the states of models on demand up to date. */
async function followStates() {
  clearTimeout(page.statesTimer);
  const states = await modelStates();
  form.showStates(states);
  if (Object.keys(states).length) page.statesTimer = setTimeout(followStates, STATES_MS);
}

function showWaiting(text, progress) {
  $("waiting").hidden = false;
  setText("waiting-state", text);
  $("waiting-progress").value = progress;
}

function askForKey({ message }) {
  page.needsKey = true;
  $("key-error").textContent = key.get() ? message : "";
  $("locked").hidden = false;
  $("key").focus();
}

async function speak() {
  if (!page.isReady || (form.model.answers && !form.model.performs)) return;
  stop();
  form.clearErrors();
  setText("problem", "");
  const body = form.body();
  body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  const take = (page.take = new Take(body, form.version));
  const answer = speech(body, take.aborter.signal, { hasWords: form.hasWords });
  const first = answer.next(); // sends the request before the audio output starts, which takes a moment
  const context = contextOf(form.model.sample_rate_hz); // within the click, because browsers allow sound only after one
  wave.clear();
  words.clear();
  page.isSpeaking = true;
  showTake();
  showCode();
  announce("Request sent");
  try {
    for (let next = await first; !next.done && take === page.take; next = await answer.next()) {
      handle(next.value, take, context);
    }
  } catch (error) {
    if (take === page.take && error.name !== "AbortError") fail(error, take);
  }
}

function handle(event, take, context) {
  if (event.type !== "start") $("waiting").hidden = event.type !== "loading";
  switch (event.type) {
    case "loading":
      showWaiting(DOING[event.state] ?? "Loading the model", event.progress);
      break;
    case "start":
      take.begin(context, event.sampleRate, heardAll);
      follow();
      break;
    case "audio":
      if (!take.length) announce("Speaking");
      take.add(event.samples);
      wave.add(event.samples, take.sampleRate);
      break;
    case "text":
      take.text += event.text;
      break;
    case "words":
      words.add(event.words);
      break;
    case "done":
      take.finish();
      wave.fit();
      break;
  }
  showTake();
}

function fail(error, take) {
  take.stop();
  ended();
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 401) askForKey(error);
  else if (!form.showError(error)) setText("problem", error.message);
  if (error.isAway) connect();
}

/** Stops speech that is playing or still arriving. */
function stop() {
  if (!page.isSpeaking) return;
  page.take.stop();
  ended();
}

/** Updates the page when speech was stopped or is complete. */
function ended() {
  const { take } = page;
  page.isSpeaking = false;
  $("waiting").hidden = true;
  wave.fit();
  showTake();
  if (take.length) announce(`${take.lengthS.toFixed(1)} seconds of speech`);
}

/** Called when the last sample was played. */
function heardAll() {
  ended();
  wave.moveTo(page.take.lengthS);
}

function contextOf(sampleRate) {
  const { contexts } = page;
  if (!contexts.has(sampleRate)) contexts.set(sampleRate, new AudioContext({ sampleRate }));
  const context = contexts.get(sampleRate);
  context.resume();
  return context;
}

/** Moves the playhead while speech plays. */
function follow() {
  cancelAnimationFrame(page.frame);
  if (!page.isSpeaking) return;
  wave.moveTo(page.take.positionS);
  words.moveTo(page.take.positionS);
  page.frame = requestAnimationFrame(follow);
}

function showTake() {
  const { take } = page;
  setText("ttfa", take.ttfaMs === null ? "–" : `${take.ttfaMs.toFixed(0)} ms`);
  setText("rtf", take.rtf === null ? "–" : take.rtf.toFixed(2));
  setText("underruns", take.player ? take.player.underruns : "–");
  setText("length", take.length ? `${take.lengthS.toFixed(1)} s` : "–");
  setText("written", take.text);
  setText("seed-used", take.body.seed);
  $("after").hidden = !take.length || take.isComing;
  $("wave").setAttribute("aria-label", take.length ? `Waveform of ${take.lengthS.toFixed(1)} seconds of speech` : "No audio yet");
  showButton();
}

function showButton() {
  $("speak").disabled = !page.isReady;
  setText("speak", page.isSpeaking ? "Stop" : "Speak");
  $("speak").classList.toggle("is-speaking", page.isSpeaking);
  $("wave").setAttribute("aria-busy", String(page.isSpeaking));
}

/** Shows the code of the last request. Once a setting has changed, it shows the code of the next one. */
function showCode() {
  if (!form.model) return;
  const body = page.take?.version === form.version ? page.take.body : form.body();
  const write = document.querySelector("[name=language-of-code]:checked").value === "curl" ? curl : python;
  setText("code", write(body, { reference: form.reference, needsKey: page.needsKey }));
  setText("count", `${$("input").value.length} of ${form.model.max_text_chars} characters`);
}

/** Copies the code. On http pages, some browsers have no clipboard API. */
async function copy() {
  const text = $("code").textContent;
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    getSelection().selectAllChildren($("code"));
    document.execCommand("copy");
  }
  setText("copy", "Copied");
  announce("Copied");
  setTimeout(() => setText("copy", "Copy"), 1500);
}

function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(page.take.wav());
  link.download = page.take.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function setText(id, text) {
  if ($(id).textContent !== String(text)) $(id).textContent = text;
}

/** Tells screen readers. */
const announce = (text) => setText("status", text);

$("keys").textContent = `${IS_MAC ? "⌘" : "Ctrl"}+Enter speaks, Esc stops`;
$("speak").addEventListener("click", () => (page.isSpeaking ? stop() : speak()));
$("again").addEventListener("click", () => {
  page.take.playAgain();
  page.isSpeaking = true;
  showTake();
  follow();
});
$("download").addEventListener("click", download);
$("keep-seed").addEventListener("click", () => {
  $("seed").value = page.take.body.seed;
  $("seed").closest("details").open = true;
  showCode();
  $("seed").focus();
});
$("pause").addEventListener("click", () => form.insert("[pause:1s]"));
$("copy").addEventListener("click", copy);
$("form").addEventListener("submit", (event) => event.preventDefault());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  connect();
});
document.querySelectorAll("[name=language-of-code]").forEach((radio) => radio.addEventListener("change", showCode));
// Audio output takes a while to start, so it starts at the first click or key, which is when browsers allow it.
for (const gesture of ["pointerdown", "keydown"]) {
  document.addEventListener(gesture, () => form.model && contextOf(form.model.sample_rate_hz), { once: true });
}
document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) speak();
  else if (event.key === "Escape") stop();
});
connect();
