/**
 * Chunks of samples, played one after the other without a gap.
 *
 * Buffers are scheduled on the sample, in a context that has their rate: nothing is resampled where they join. An AudioWorklet would need
 * a secure context (https, or localhost), and people open this page from other machines.
 */

const FIRST_LEAD_S = 0.06; // from the arrival of a chunk to its sound
const MAX_LEAD_S = 2;
const MARGIN_S = 0.01; // what is due sooner may come too late for the audio thread

export class Player {
  /** `runs`: stretches without a gap, {frame: of the context, from: sample}. `schedule`: every chunk, {frame, length, aheadS}. */
  constructor(context, sampleRate, onEnded = () => {}) {
    Object.assign(this, { context, sampleRate, onEnded });
    this.runs = [];
    this.schedule = [];
    this.length = 0; // samples that came
    this.leadS = FIRST_LEAD_S;
    this.isOver = false; // whether nothing more comes
    this.isHeard = false; // whether all of it was played
    this.sources = new Set();
  }

  /** How often the next chunk was not there in time. */
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

  /** Where the next chunk begins: behind the last one, or, if that was over, a little later than now. After each gap more is kept ahead. */
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

  /** Nothing more comes. */
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

  /** What is heard now, in seconds of the speech. */
  get positionS() {
    if (this.isHeard) return this.length / this.sampleRate; // its last sample is played, whatever the output's delay
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
