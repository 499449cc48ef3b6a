/** A waveform that grows as audio arrives, with a playhead. */

const PEAK_S = 0.01;
const BAR_PX = 3;
const MIN_SPAN_S = 4;
const GROWTH = 1.5; // factor for the visible time span when the audio no longer fits

export class Wave {
  constructor(canvas) {
    this.canvas = canvas;
    this.clear();
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  clear() {
    this.peaks = [];
    this.length = 0;
    this.spanS = MIN_SPAN_S;
    this.positionS = 0;
    this.draw();
  }

  add(samples, sampleRate) {
    const perPeak = PEAK_S * sampleRate;
    for (let i = 0; i < samples.length; i++) {
      const peak = Math.floor((this.length + i) / perPeak);
      this.peaks[peak] = Math.max(this.peaks[peak] ?? 0, Math.abs(samples[i]));
    }
    this.length += samples.length;
    while (this.lengthS > this.spanS) this.spanS *= GROWTH;
    this.draw();
  }

  get lengthS() {
    return this.peaks.length * PEAK_S;
  }

  /** Scales the waveform to the full width once it is complete. */
  fit() {
    if (this.peaks.length) this.spanS = this.lengthS;
    this.draw();
  }

  moveTo(positionS) {
    this.positionS = positionS;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = devicePixelRatio;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const draw = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    const color = (name) => style.getPropertyValue(name);
    draw.scale(scale, scale);
    const num = Math.floor(width / BAR_PX);
    const peaksPerBar = this.spanS / PEAK_S / num;
    const headPx = (this.positionS / this.spanS) * width;
    for (let bar = 0; bar < num; bar++) {
      const from = Math.floor(bar * peaksPerBar);
      const heard = this.peaks.slice(from, Math.max(from + 1, Math.floor((bar + 1) * peaksPerBar)));
      const tall = heard.length ? Math.max(2, Math.max(...heard) * (height - 4)) : 2;
      draw.fillStyle = color(!heard.length ? "--line" : bar * BAR_PX < headPx ? "--accent" : "--wave");
      draw.fillRect(bar * BAR_PX, (height - tall) / 2, BAR_PX - 1, tall);
    }
    if (this.positionS > 0) {
      draw.fillStyle = color("--text");
      draw.fillRect(Math.min(headPx, width - 1.5), 0, 1.5, height);
    }
  }
}
