/**
 * Plays chunks of samples one after the other without a gap.
 *
 * Every buffer starts on an exact sample, in a context with the buffers' own rate, so nothing is resampled where they join. An
 * AudioWorklet would need a secure context (https or localhost), but users also open this page from other machines over http.
 */

const FIRST_LEAD_S = 0.06; // from the arrival of the first chunk to its playback
const MAX_LEAD_S = 2;
const MARGIN_S = 0.01; // audio due sooner may reach the audio thread too late

export class Player {
  /** `runs`: the stretches without a gap, {frame: of the context, from: sample}. `schedule`: all chunks, {frame, length, aheadS}. */
  constructor(context, sampleRate, onEnded = () => {}) {
    Object.assign(this, { context, sampleRate, onEnded });
    this.runs = [];
    this.schedule = [];
    this.length = 0; // samples received
    this.leadS = FIRST_LEAD_S;
    this.isOver = false; // whether all samples have arrived
    this.isHeard = false; // whether all samples were played
    this.sources = new Set();
  }

  /** How often the next chunk arrived too late. */
  get underruns() {
    return Math.max(0, this.runs.length - 1);
  }

  push(samples) {
    if (!samples.length) return;
    const frame = this.nextFrame();
    const source = this.context.createBufferSource();
    source.buffer = this.context.createBuffer(1, samples.length, this.sampleRate);
    source.buffer.copyToChannel(samples, 0);
    source.connect(this.context.destination);
    source.onended = () => this.#ended(source);
    source.start(frame / this.sampleRate);
    this.sources.add(source);
    const aheadS = frame / this.sampleRate - this.context.currentTime;
    this.schedule.push({ frame, length: samples.length, aheadS });
    this.length += samples.length;
  }

  /** Returns where the next chunk begins: after the last one, or a little later than now if that has ended. Each gap increases the lead. */
  nextFrame() {
    const run = this.runs.at(-1);
    const now = this.context.currentTime;
    if (run) {
      const frame = run.frame + this.length - run.from;
      if (frame / this.sampleRate >= now + MARGIN_S) return frame;
      this.leadS = Math.min(2 * this.leadS, MAX_LEAD_S);
    }
    const frame = Math.ceil((now + this.leadS) * this.sampleRate);
    this.runs.push({ frame, from: this.length });
    return frame;
  }

  /** Called when all samples have arrived. */
  finish() {
    this.isOver = true;
    if (!this.sources.size) this.onEnded();
  }

  stop() {
    for (const source of this.sources) {
      source.onended = null;
      source.stop();
    }
    this.sources.clear();
  }

  /** The position of playback, in seconds of the speech. */
  get positionS() {
    if (this.isHeard) return this.length / this.sampleRate; // the end, whatever the output latency
    const now = (this.context.currentTime - (this.context.outputLatency || 0)) * this.sampleRate;
    const i = this.runs.findLastIndex((run) => run.frame <= now);
    if (i < 0) return 0;
    const end = this.runs[i + 1]?.from ?? this.length;
    return Math.min(this.runs[i].from + now - this.runs[i].frame, end) / this.sampleRate;
  }

  #ended(source) {
    this.sources.delete(source);
    if (!this.isOver || this.sources.size) return;
    this.isHeard = true;
    this.onEnded();
  }
}
