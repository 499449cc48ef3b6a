/** One answer: its samples, its timing, and its playback. */

import { Player } from "./player.js";
import { wavFile } from "./wav.js";

export class Take {
  /** `body`: of the request. `version`: of the form when the request was made. */
  constructor(body, version) {
    Object.assign(this, { body, version });
    this.beganMs = performance.now();
    this.chunks = [];
    this.length = 0; // samples
    this.text = ""; // text that the model wrote along with the audio
    this.ttfaMs = this.tookMs = null;
    this.player = null; // plays the audio as it arrives; `replay` plays it again
    this.replay = null;
    this.isComing = true;
    this.aborter = new AbortController();
  }

  /** `context`: has the model's sample rate, and was made within the click that allows sound. */
  begin(context, sampleRate, onEnded) {
    Object.assign(this, { context, sampleRate, onEnded });
    this.player = new Player(context, sampleRate, onEnded);
  }

  add(samples) {
    this.tookMs = performance.now() - this.beganMs;
    this.ttfaMs ??= this.tookMs;
    this.chunks.push(samples);
    this.length += samples.length;
    this.player.push(samples);
  }

  /** Called when all samples have arrived. */
  finish() {
    this.isComing = false;
    this.tookMs = performance.now() - this.beganMs;
    this.player.finish();
  }

  stop() {
    this.isComing = false;
    this.aborter.abort();
    this.player?.stop();
    this.replay?.stop();
  }

  /** Plays the whole take from its beginning. */
  playAgain() {
    this.stop();
    this.replay = new Player(this.context, this.sampleRate, this.onEnded);
    for (const chunk of this.chunks) this.replay.push(chunk);
    this.replay.finish();
  }

  get lengthS() {
    return this.length ? this.length / this.sampleRate : 0;
  }

  get positionS() {
    return (this.replay ?? this.player)?.positionS ?? 0;
  }

  /** The real-time factor: seconds needed per second of speech. */
  get rtf() {
    return this.length ? this.tookMs / 1000 / this.lengthS : null;
  }

  get name() {
    return `${this.body.model.replace(/[^\w.-]+/g, "_")}-${this.body.seed}.wav`;
  }

  wav() {
    return wavFile(this.chunks, this.sampleRate);
  }
}
