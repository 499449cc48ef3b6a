/** Long works: documents that the server speaks in the background. They go on without the page, which finds them again. */

import { ask } from "./api.js";

const POLL_MS = 2000;
const PATH = "v1/audio/works";
const DOING = { waiting: "waits for earlier works", speaking: "speaking", joining: "joining the chapters", failed: "stopped" };
const $ = (id) => document.getElementById(id);

export class Works {
  /** `form`: the settings of new works. */
  constructor(form) {
    this.form = form;
    this.entries = new Map(); // of the list, by the work's id
    this.timer = null;
    this.isLost = false; // whether the server did not answer
    $("document").addEventListener("change", () => this.#showButton());
    $("make-work").addEventListener("click", () => this.#act(() => this.#add()));
  }

  /** Shows the works, and goes on showing their progress until all are complete. */
  async refresh() {
    clearTimeout(this.timer);
    await this.#try(async () => {
      const { data, accepts } = await (await ask(PATH)).json();
      $("works").hidden = !accepts.length;
      $("document").accept = accepts.join();
      for (const [id, entry] of this.entries) {
        if (data.some((work) => work.id === id)) continue;
        entry.remove();
        this.entries.delete(id);
      }
      for (const work of data) await this.#show(work);
      if (data.some((work) => !["complete", "failed"].includes(work.state))) this.#later();
    });
  }

  #later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), POLL_MS);
  }

  async #add() {
    const [file] = $("document").files;
    const { input, model, voice, ...options } = this.form.body();
    const body = new FormData();
    body.append("document", file);
    if (model) body.append("model", model);
    if (voice) body.append("voice", voice);
    body.append("options", JSON.stringify(options));
    $("make-work").disabled = true;
    try {
      await ask(PATH, { method: "POST", body });
      $("document").value = "";
    } finally {
      this.#showButton();
    }
    await this.refresh();
  }

  /** Does what the user asks for. */
  #act(act) {
    $("works-problem").textContent = "";
    this.form.clearErrors();
    return this.#try(act);
  }

  /** Does what may fail, and shows why it did. A lost connection is tried again. */
  async #try(act) {
    try {
      await act();
      if (this.isLost) $("works-problem").textContent = "";
      this.isLost = false;
    } catch (error) {
      if (!this.form.showError(error)) $("works-problem").textContent = error.message;
      this.isLost = Boolean(error.isAway);
      if (this.isLost) this.#later();
    }
  }

  #showButton() {
    $("make-work").disabled = !$("document").files.length;
  }

  async #show(work) {
    const entry = this.entries.get(work.id) ?? this.#entry(work);
    const find = (selector) => entry.querySelector(selector);
    const isComplete = work.state === "complete";
    const percent = `${Math.floor(100 * work.progress)} %`;
    setText(find(".title"), work.author ? `${work.title}, by ${work.author}` : work.title);
    setText(find(".facts"), isComplete ? `${lengthOf(work.audio_s)} · ${work.model}` : `${DOING[work.state]}, ${percent}`);
    find("progress").value = work.progress;
    find("progress").hidden = isComplete;
    setText(find(".error"), work.error?.message ?? "");
    find(".save").hidden = !isComplete;
    find(".again").hidden = work.state !== "failed";
    setText(find("summary"), work.num_chapters === 1 ? "1 chapter" : `${work.num_chapters} chapters`);
    if (find("details").open) await this.#showChapters(work.id, find("ol"));
  }

  /** Makes the entry of a work in the list. */
  #entry({ id, title }) {
    const entry = $("work").content.firstElementChild.cloneNode(true);
    entry.dataset.work = id;
    const on = (selector, act) => entry.querySelector(selector).addEventListener("click", () => this.#act(act));
    entry.querySelector("progress").setAttribute("aria-label", title);
    on(".save", async () => save(await fileAt(`${PATH}/${id}/book.m4b`), `${title}.m4b`));
    on(".again", () => this.#change(`${PATH}/${id}/resume`, "POST"));
    on(".remove", async () => {
      if (confirm(`Delete "${title}" and its audio from the server?`)) await this.#change(`${PATH}/${id}`, "DELETE");
    });
    const details = entry.querySelector("details");
    details.addEventListener("toggle", () => details.open && this.#try(() => this.#showChapters(id, details.querySelector("ol"))));
    this.entries.set(id, entry);
    $("works-list").append(entry);
    return entry;
  }

  async #change(path, method) {
    await ask(path, { method });
    await this.refresh();
  }

  async #showChapters(id, list) {
    const { chapters } = await (await ask(`${PATH}/${id}`)).json();
    for (const chapter of chapters) {
      const line = list.children[chapter.number - 1] ?? list.appendChild(this.#chapter(id, chapter));
      line.querySelector("progress").value = chapter.progress;
      line.querySelector("progress").hidden = chapter.audio_s !== null;
      line.querySelector(".listen").hidden = chapter.audio_s === null || !line.querySelector("audio").hidden;
    }
  }

  /** Makes the line of a chapter. */
  #chapter(id, { number, title }) {
    const line = $("chapter").content.firstElementChild.cloneNode(true);
    setText(line.querySelector(".title"), title);
    line.querySelector("progress").setAttribute("aria-label", title);
    const listen = line.querySelector(".listen");
    listen.setAttribute("aria-label", `Listen to ${title}`);
    listen.addEventListener("click", () =>
      this.#act(async () => {
        const audio = line.querySelector("audio");
        audio.src = URL.createObjectURL(await fileAt(`${PATH}/${id}/chapters/${number}`));
        listen.hidden = true;
        audio.hidden = false;
        await audio.play();
      }),
    );
    return line;
  }
}

/** Returns a file of the server. A link could not send the API key. */
async function fileAt(path) {
  return (await ask(path)).blob();
}

function save(file, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function lengthOf(seconds) {
  const minutes = Math.floor(seconds / 60);
  const rest = String(minutes % 60).padStart(2, "0");
  if (minutes >= 60) return `${Math.floor(minutes / 60)} h ${rest} min`;
  return minutes ? `${minutes} min` : `${seconds.toFixed(0)} s`;
}
