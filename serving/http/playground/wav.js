/** Returns chunks of mono samples as a 16-bit WAV file, in a Blob. */
export function wavFile(chunks, sampleRate) {
  const numBytes = 2 * chunks.reduce((sum, chunk) => sum + chunk.length, 0);
  const head = new DataView(new ArrayBuffer(44));
  const write = (at, text) => [...text].forEach((letter, i) => head.setUint8(at + i, letter.charCodeAt(0)));
  write(0, "RIFF");
  head.setUint32(4, 36 + numBytes, true);
  write(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true); // PCM
  head.setUint16(22, 1, true); // mono
  head.setUint32(24, sampleRate, true);
  head.setUint32(28, 2 * sampleRate, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  write(36, "data");
  head.setUint32(40, numBytes, true);
  return new Blob([head, ...chunks.map(int16)], { type: "audio/wav" });
}

/** Converts samples to int16. Samples that were int16 before get the same values again. */
function int16(samples) {
  const words = new DataView(new ArrayBuffer(2 * samples.length));
  samples.forEach((sample, i) => {
    words.setInt16(2 * i, Math.max(-32768, Math.min(32767, Math.round(32768 * sample))), true);
  });
  return words;
}
