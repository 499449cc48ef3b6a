/** The settings: the chosen model's options as fields, their values as the body of a request, and errors next to their fields. */

import { Recording } from "./reference.js";

const $ = (id) => document.getElementById(id);
const WIDEST = 100_000; // of a range with a slider; wider ones only keep out mistakes

export class Form {
  /** `onChange`: called when a value has changed. */
  constructor(onChange) {
    this.version = 0; // increases with every change
    this.onChange = () => {
      this.version += 1;
      onChange();
    };
    this.recording = new Recording(() => this.model.reference_s, this.onChange);
    $("model").addEventListener("change", () => this.show(this.models.find((model) => model.id === $("model").value)));
    $("voice").addEventListener("change", () => this.#showRecording());
    $("form").addEventListener("input", ({ target }) => {
      const field = target.closest(".field");
      if (!field) return; // the language of the code is not a setting
      clearError(field);
      this.onChange();
    });
  }

  fill(models, voices) {
    Object.assign(this, { models, voices });
    const chosen = models.find((model) => model.id === $("model").value) ?? models[0];
    $("model").replaceChildren(...models.map((model) => new Option(model.id)));
    $("model").value = chosen.id;
    this.show(chosen);
  }

  /** Shows a model's fields. Values stay if they mean the same for this model. */
  show(model) {
    const isOther = JSON.stringify(model.options) !== JSON.stringify(this.model?.options);
    if (isOther) $("options").replaceChildren(...model.options.map(optionField));
    this.model = model;
    this.#showFacts(model);
    this.#showVoices(model);
    const others = model.languages.filter((language) => language !== "auto");
    refill($("language"), [new Option("automatic", ""), ...others.map((language) => new Option(language))]);
    hide("language", !others.length);
    const designs = model.modes.includes("design");
    const answers = model.answers && !model.performs;
    hide("voice", model.answers && !model.voices.length);
    hide("instructions", !designs && !answers && !model.modes.includes("instruct"));
    $("instructions-label").textContent = answers ? "System prompt" : designs ? "Describe the voice" : "How to speak";
    hide("sentence_gap_s", model.piece_s === null);
    hide("words", !model.timestamp_granularities.includes("word"));
    $("input").maxLength = model.max_text_chars;
    this.onChange();
  }

  /** Shows new states of models on demand, by their names. */
  showStates(states) {
    for (const model of this.models) Object.assign(model, states[model.id]);
    this.#showFacts(this.model);
  }

  #showFacts({ family, variant, sample_rate_hz: rateHz, licence, state, progress }) {
    const weights = licence && `Weights: ${licence}`;
    const percent = `${Math.round(100 * progress)} %`;
    const doing = { loaded: "", cold: "not loaded: the next request loads it", loading: `loading ${percent}`, warming: `warming up ${percent}` };
    const facts = [family, variant, `${rateHz / 1000} kHz`, weights, doing[state] ?? state];
    $("model-hint").textContent = facts.filter(Boolean).join(" · ");
  }

  /** Lists the model's own voices, uploaded ones and a recording, or the empty choice if the model makes its own voice. */
  #showVoices(model) {
    const uploaded = this.voices.filter((voice) => voice.type !== "preset" && voice.models.includes(model.id));
    const own = model.voices.map((name) => new Option(name));
    const yours = uploaded.map((voice) => new Option(`${voice.name} (uploaded)`, voice.name));
    const none = [];
    if (model.modes.includes("design")) none.push(new Option("as described", ""));
    else if (model.modes.includes("voice") && !own.length) none.push(new Option("random", ""));
    const recording = model.reference_s ? [new Option("from a recording", "")] : [];
    recording.forEach((option) => (option.dataset.recording = ""));
    refill($("voice"), [...none, ...own, ...yours, ...recording]);
    this.#showRecording();
  }

  #showRecording() {
    $("recording").hidden = !this.isRecording;
  }

  get isRecording() {
    return $("voice").selectedOptions[0]?.dataset.recording !== undefined;
  }

  /** The body of a request: only values that were set. A text in a number field is sent as it is, so that the server can say what is wrong. */
  body() {
    const body = { model: this.model.id, input: $("input").value };
    if ($("voice").value) body.voice = $("voice").value;
    for (const control of $("form").querySelectorAll("[data-sent]")) {
      const value = control.closest("[hidden]") ? "" : control.value.trim();
      if (value) body[control.name] = control.dataset.sent === "number" ? number(value) : value;
    }
    for (const box of $("options").querySelectorAll("[type=checkbox]")) {
      if (box.checked !== box.defaultChecked) body[box.name] = box.checked;
    }
    if (this.isRecording && this.recording.base64) body.ref_audio = this.recording.base64;
    return body;
  }

  /** Whether the answer should have word times. */
  get hasWords() {
    return !$("words-wanted").closest("[hidden]") && $("words-wanted").checked;
  }

  /** Puts a mark into the text, where the cursor is. */
  insert(mark) {
    const { selectionStart: start, selectionEnd: end, value } = $("input");
    const space = start && !/\s$/.test(value.slice(0, start)) ? " " : "";
    $("input").setRangeText(`${space}${mark} `, start, end, "end");
    $("input").dispatchEvent(new Event("input", { bubbles: true }));
    $("input").focus();
  }

  /** The name of the file with ref_audio. */
  get reference() {
    return this.isRecording ? (this.recording.file?.name ?? null) : null;
  }

  /** Shows an error next to its field, and returns whether there is such a field. */
  showError({ param, message }) {
    const field = param && $("form").querySelector(`[data-field="${CSS.escape(param)}"]:not([hidden] *, [hidden])`);
    if (!field) return false;
    field.closest("details")?.setAttribute("open", "");
    field.querySelector(".error").textContent = message;
    const control = field.querySelector("input:not([type=range]), select, textarea");
    control.setAttribute("aria-invalid", "true");
    control.focus();
    return true;
  }

  clearErrors() {
    $("form").querySelectorAll(".field").forEach(clearError);
  }
}

function clearError(field) {
  field.querySelector(".error").textContent = "";
  field.querySelector("[aria-invalid]")?.removeAttribute("aria-invalid");
}

/** Makes a field for an option of the model: a checkbox, a selection, or a text line, with a slider for a number in a range. An empty line means the default. */
function optionField({ name, type, help, possible, default: standard, range, choices }) {
  const field = $("option").content.firstElementChild.cloneNode(true);
  const id = `option-${name}`;
  field.dataset.field = name;
  const label = field.querySelector("label");
  label.htmlFor = id;
  label.textContent = name.replaceAll("_", " ");
  let control;
  if (choices.length) {
    control = document.createElement("select");
    control.append(new Option(standard === null ? "the model decides" : `${standard} (default)`, ""));
    control.append(...choices.filter((choice) => choice !== standard).map((choice) => new Option(choice)));
  } else {
    control = document.createElement("input");
    control.placeholder = standard === null ? "the model decides" : String(standard);
  }
  if (type === "bool") {
    control.type = "checkbox";
    control.defaultChecked = standard === true;
    field.classList.add("check");
  } else {
    const isNumber = type === "int" || type === "float";
    control.dataset.sent = isNumber ? "number" : "text";
    if (isNumber) control.inputMode = type === "int" ? "numeric" : "decimal";
  }
  Object.assign(control, { id, name });
  control.setAttribute("aria-describedby", `${id}-hint ${id}-error`);
  label.after(control);
  if (control.dataset.sent === "number" && range && standard !== null && range[1] - range[0] <= WIDEST) {
    control.before(slider(control, type, range, standard));
    field.classList.add("slid");
  }
  const hint = field.querySelector(".hint");
  hint.id = `${id}-hint`;
  hint.textContent = type === "bool" || choices.length ? help : `${help} (${possible})`;
  field.querySelector(".error").id = `${id}-error`;
  return field;
}

/** Makes a slider that writes its value into a text line, and that follows what is typed there. An empty line means the default. */
function slider(line, type, [low, high], standard) {
  const made = document.createElement("input");
  Object.assign(made, { type: "range", min: low, max: high, step: type === "int" ? 1 : "any", value: standard });
  made.setAttribute("aria-label", `${line.name.replaceAll("_", " ")}, slider`);
  made.addEventListener("input", () => (line.value = type === "int" ? made.value : Number(made.value).toPrecision(3) * 1));
  line.addEventListener("input", () => (made.value = line.value.trim() === "" ? standard : line.value));
  return made;
}

/** Replaces the options of a selection. The chosen one stays if it is among the new ones. */
function refill(select, options) {
  const before = select.value;
  select.replaceChildren(...options);
  if (options.some((option) => option.value === before && option.value)) select.value = before;
}

function hide(field, isHidden) {
  document.querySelector(`[data-field=${field}]`).hidden = isHidden;
}

const number = (text) => (Number.isFinite(Number(text)) ? Number(text) : text);
