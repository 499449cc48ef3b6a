/** The microphone's samples, on the audio thread. */

registerProcessor("capture", class extends AudioWorkletProcessor {
  process([[samples]]) {
    if (samples) this.port.postMessage(samples.slice());
    return true;
  }
});
