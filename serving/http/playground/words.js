/** The words of a take under its waveform. The one that is spoken is marked. */

export class Words {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.words = [];
    this.current = -1;
    this.element.replaceChildren();
    this.element.hidden = true;
  }

  /** `words`: as the server sends them, in order. */
  add(words) {
    for (const { word, start_s, end_s, aligned } of words) {
      const span = document.createElement("span");
      span.textContent = word;
      span.title = `${start_s.toFixed(2)} to ${end_s.toFixed(2)} s${aligned ? "" : ", estimated"}`;
      span.classList.toggle("estimated", !aligned);
      if (this.words.length) this.element.append(" ");
      this.element.append(span);
      this.words.push({ start_s, end_s, span });
    }
    this.element.hidden = !this.words.length;
  }

  /** Marks the last word that has begun. */
  moveTo(positionS) {
    const next = this.words.findIndex(({ start_s }) => start_s > positionS);
    const current = (next < 0 ? this.words.length : next) - 1;
    if (current === this.current) return;
    this.words[this.current]?.span.classList.remove("spoken");
    this.words[current]?.span.classList.add("spoken");
    this.current = current;
  }
}
