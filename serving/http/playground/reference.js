/** A recording of a voice, from a file or the microphone, with its length and level. */

import { wavFile } from "./wav.js";

const QUIET_DB = -30; // peak level below which a recording is too quiet
const CLIPPED = 0.999;
const MAX_CLIPPED = 0.001; // share of samples
const $ = (id) => document.getElementById(id);
const decibels = (level) => 20 * Math.log10(Math.max(level, 1e-5));

export class Recording {
  /** `possibleS`: returns the shortest and the longest duration for the model. `onChange`: called for a new recording. */
  constructor(possibleS, onChange) {
    Object.assign(this, { possibleS, onChange, file: null, base64: null, recorder: null });
    $("ref-file").addEventListener("change", ({ target }) => target.files[0] && this.take(target.files[0]));
    $("record").addEventListener("click", () => (this.recorder ? this.stop() : this.record()));
    const isSecure = Boolean(navigator.mediaDevices);
    $("record").hidden = !isSecure;
    $("no-microphone").hidden = isSecure;
  }

  /** Takes a file, which is sent unchanged. */
  async take(file) {
    const [base64, said] = await Promise.all([toBase64(file), this.#judge(file)]);
    Object.assign(this, { file, base64 });
    $("ref-facts").textContent = said;
    const audio = $("ref-audio");
    URL.revokeObjectURL(audio.src);
    audio.src = $("ref-save").href = URL.createObjectURL(file);
    $("ref-save").download = file.name;
    $("ref-heard").hidden = false;
    this.onChange();
  }

  async #judge(file) {
    try {
      const samples = await decoded(file);
      return `${file.name}: ${judged(samples, this.possibleS())}`;
    } catch {
      return `${file.name}: this browser cannot read the file, but the server may be able to`;
    }
  }

  async record() {
    let stream;
    try {
      const audio = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
      stream = await navigator.mediaDevices.getUserMedia({ audio });
    } catch (error) {
      $("ref-facts").textContent = `The microphone is not available: ${error.message}`;
      return;
    }
    const pieces = [];
    const recorder = (this.recorder = new MediaRecorder(stream, { audioBitsPerSecond: 256_000 }));
    const meter = new Meter(stream, this.possibleS(), () => this.stop());
    recorder.ondataavailable = ({ data }) => pieces.push(data);
    recorder.onstop = async () => {
      this.recorder = null;
      meter.stop();
      stream.getTracks().forEach((track) => track.stop());
      $("record").textContent = "Record";
      const { channels, sampleRate } = await decoded(new Blob(pieces));
      await this.take(new File([wavFile(channels, sampleRate)], "reference.wav", { type: "audio/wav" }));
    };
    recorder.start();
    $("record").textContent = "Stop recording";
  }

  stop() {
    if (this.recorder.state === "recording") this.recorder.stop();
  }
}

/** Shows level and length during a recording, and ends it at the longest duration. */
class Meter {
  constructor(stream, [shortestS, longestS], onEnd) {
    this.context = new AudioContext();
    const analyser = this.context.createAnalyser();
    this.context.createMediaStreamSource(stream).connect(analyser);
    const samples = new Float32Array(analyser.fftSize);
    const beganMs = performance.now();
    $("ref-level").hidden = false;
    this.timer = setInterval(() => {
      analyser.getFloatTimeDomainData(samples);
      const lengthS = (performance.now() - beganMs) / 1000;
      $("ref-level").value = 60 + decibels(loudest(samples));
      const more = lengthS < shortestS ? `, at least ${shortestS} s` : "";
      $("ref-facts").textContent = `Recording: ${lengthS.toFixed(1)} s${more}, ${longestS} s at most`;
      if (lengthS >= longestS - 0.2) onEnd();
    }, 50);
  }

  stop() {
    clearInterval(this.timer);
    this.context.close();
    $("ref-level").hidden = true;
  }
}

/** Returns {channels: [mono], sampleRate}. Throws if the browser does not know the format. */
async function decoded(file) {
  const context = new OfflineAudioContext(1, 1, 48000);
  const buffer = await context.decodeAudioData(await file.arrayBuffer());
  const mono = buffer.getChannelData(0);
  for (let c = 1; c < buffer.numberOfChannels; c++) {
    buffer.getChannelData(c).forEach((sample, i) => (mono[i] += (sample - mono[i]) / (c + 1)));
  }
  return { channels: [mono], sampleRate: buffer.sampleRate };
}

function judged({ channels: [samples], sampleRate }, [shortestS, longestS]) {
  const lengthS = samples.length / sampleRate;
  const peakDb = decibels(loudest(samples));
  const clipped = samples.reduce((sum, sample) => sum + (Math.abs(sample) >= CLIPPED), 0) / samples.length;
  const facts = `${lengthS.toFixed(1)} s, peak ${peakDb.toFixed(0)} dB`;
  if (lengthS < shortestS) return `${facts}: too short; use ${shortestS} to ${longestS} s`;
  if (lengthS > longestS) return `${facts}: too long; use ${shortestS} to ${longestS} s`;
  if (peakDb < QUIET_DB) return `${facts}: very quiet; move closer to the microphone`;
  if (clipped > MAX_CLIPPED) return `${facts}: clipped; record it with less gain`;
  return `${facts}: good`;
}

const loudest = (samples) => samples.reduce((most, sample) => Math.max(most, Math.abs(sample)), 0);

async function toBase64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}
