/** The settings: what the chosen model takes, as fields; what they hold, as the body of a request; errors, each beside its field. */

import { Recording } from "./reference.js";

const $ = (id) => document.getElementById(id);

export class Form {
  /** `onChange`: a value is another one. */
  constructor(onChange) {
    this.version = 0; // another one whenever a value is
    this.onChange = () => {
      this.version += 1;
      onChange();
    };
    this.recording = new Recording(() => this.model.reference_s, this.onChange);
    $("model").addEventListener("change", () => this.show(this.models.find((model) => model.id === $("model").value)));
    $("voice").addEventListener("change", () => this.#showRecording());
    $("form").addEventListener("input", ({ target }) => {
      const field = target.closest(".field");
      if (!field) return; // the language of the code is no setting
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

  /** One model's fields. What was set stays where it still means the same. */
  show(model) {
    const isOther = JSON.stringify(model.options) !== JSON.stringify(this.model?.options);
    if (isOther) $("options").replaceChildren(...model.options.map(optionField));
    this.model = model;
    const rate = `${model.sample_rate_hz / 1000} kHz`;
    const licence = model.licence && `Weights: ${model.licence}`;
    $("model-hint").textContent = [model.family, model.variant, rate, licence].filter(Boolean).join(" · ");
    this.#showVoices(model);
    const others = model.languages.filter((language) => language !== "auto");
    refill($("language"), [new Option("automatic", ""), ...others.map((language) => new Option(language))]);
    hide("language", !others.length);
    const designs = model.modes.includes("design");
    hide("instructions", !designs && !model.modes.includes("instruct"));
    $("instructions-label").textContent = designs ? "Describe the voice" : "How to speak";
    $("input").maxLength = model.max_text_chars;
    this.onChange();
  }

  /** The model's own, uploaded ones, a recording; none where the model makes one by itself. */
  #showVoices(model) {
    const uploaded = this.voices.filter((voice) => voice.type !== "preset" && voice.models.includes(model.id));
    const own = model.voices.map((name) => new Option(name));
    const yours = uploaded.map((voice) => new Option(`${voice.name} (uploaded)`, voice.name));
    const none = [];
    if (model.modes.includes("design")) none.push(new Option("as described", ""));
    else if (model.modes.includes("voice") && !own.length) none.push(new Option("by chance", ""));
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

  /** The body of a request: what was set, and nothing else. A text that should be a number goes as it is: the server knows best. */
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

  /** The file that ref_audio came from. */
  get reference() {
    return this.isRecording ? (this.recording.file?.name ?? null) : null;
  }

  /** Beside its field -> whether there is one. */
  showError({ param, message }) {
    const field = param && $("form").querySelector(`[data-field="${CSS.escape(param)}"]:not([hidden] *, [hidden])`);
    if (!field) return false;
    field.closest("details")?.setAttribute("open", "");
    field.querySelector(".error").textContent = message;
    const control = field.querySelector("input, select, textarea");
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

/** An option of the model as a field: a box, a choice, or a line whose emptiness means the default. */
function optionField({ name, type, help, possible, default: standard, choices }) {
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
  const hint = field.querySelector(".hint");
  hint.id = `${id}-hint`;
  hint.textContent = type === "bool" || choices.length ? help : `${help} (${possible})`;
  field.querySelector(".error").id = `${id}-error`;
  return field;
}

/** Other options; the same one stays chosen where it is among them. */
function refill(select, options) {
  const before = select.value;
  select.replaceChildren(...options);
  if (options.some((option) => option.value === before && option.value)) select.value = before;
}

function hide(field, isHidden) {
  document.querySelector(`[data-field=${field}]`).hidden = isHidden;
}

const number = (text) => (Number.isFinite(Number(text)) ? Number(text) : text);
