"""Train a small voice of your own: python -m train_a_voice STEP DIRECTORY. See the README.md in this
folder.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from train_a_voice import (
    align,
    checkpoint,
    corpus,
    decoder,
    features,
    gather,
    judge,
    sentences,
    talker,
    vocoder,
)
from train_a_voice.codes import Codebooks
from train_a_voice.flite import RATE_HZ as FLITE_HZ
from train_a_voice.flite import Shelf
from train_a_voice.job import Job, Schedule
from train_a_voice.settings import FULL, QUICK, Settings, codec_config
from zoo.check import check
from zoo.qwen3_tts import describe
from zoo.qwen3_tts.codec import Decoder, DecoderConfig
from zoo.qwen3_tts.model import Qwen3TTS, Talker
from zoo.qwen3_tts.prompt import PromptWriter
from zoo.request import Request

SEED = 1
NUM_GENERATED = 40  # held-out sentences in addition to those written by hand
SETS = ("held_out", "development")  # sentences written by hand that no part is trained on
UNQUANTISED, QUANTISED = 0.03, 0.07  # word errors that the gates allow above flite's own


def counter(name: str, total: int) -> Callable[[int], None]:
    began_s = time.monotonic()

    def progress(done: int) -> None:
        if done % 500 == 0 or done == total:
            print(f"{name}: {done} of {total}, {time.monotonic() - began_s:.0f} s", flush=True)

    return progress


def speech(work: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Steps 1 and 2: generate sentences and let flite speak them."""
    lexicon = judge.lexicon()
    held_out = sentences.LINES["held_out"] + sentences.generate(NUM_GENERATED, lexicon, SEED + 6)
    development = sentences.LINES["development"]
    texts = sentences.generate(settings.num_sentences, lexicon, SEED, frozenset(held_out + development))
    for name, lines in (("held_out", held_out), ("development", development), ("train", texts)):
        Shelf(work / name).fill(lines, counter(f"speech of {name}", len(lines)))


def codes(work: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Steps 3 and 4: compute features, codebooks, codes, and the samples that the decoder learns."""
    names = [name for name in (*SETS, "train") if (work / name).exists()]
    for name in names:
        if not (work / name / "edges.npy").exists():
            shelf = Shelf(work / name)
            corpus.make_features(shelf, work / name, counter(f"features of {name}", len(shelf.utterances)))
    if not (work / "codebooks.pt").exists():
        frames = corpus.Frames.load(work / "train")
        some = frames.first(settings.num_code_sentences)
        fitted = Codebooks.fit(
            frames.mel[some].astype(np.float32), frames.voicing[some], settings.mel_levels, seed=0
        )
        fitted.save(work / "codebooks.pt")
    codebooks = Codebooks.load(work / "codebooks.pt")
    for name in names:
        frames = corpus.Frames.load(work / name)
        if not (work / name / "codes.npy").exists():
            corpus.make_codes(frames, codebooks, work / name / "codes.npy")
        if name != "train":
            continue
        found = np.load(work / name / "codes.npy")
        num = min(settings.num_decoder_sentences, len(frames.edges) - 1)
        progress = counter(f"targets of {name}", num)
        corpus.make_targets(frames, found, codebooks, num, work / name / "target.s16", progress)


def gate(work: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Check before training that the features, and then the codes, are good enough to be understood."""
    shelf, frames = Shelf(work / args.set), corpus.Frames.load(work / args.set)
    codebooks, found = Codebooks.load(work / "codebooks.pt"), np.load(work / args.set / "codes.npy")
    heard: dict[str, list[str]] = {"flite": [], "unquantised": [], "quantised": []}
    for utterance, at in list(zip(shelf.utterances, spans(frames), strict=True))[: args.count]:
        mel, cycles, voicing = codebooks.decode(found[at])
        true = vocoder.speak(frames.mel[at].astype(np.float32), frames.cycles[at], frames.voicing[at])
        heard["flite"].append(judge.transcribe(shelf.samples(utterance), FLITE_HZ))
        heard["unquantised"].append(judge.transcribe(true, features.RATE_HZ))
        heard["quantised"].append(judge.transcribe(vocoder.speak(mel, cycles, voicing), features.RATE_HZ))
    texts = [utterance.text for utterance in shelf.utterances[: args.count]]
    rates = {name: judge.word_error_rate(texts, lines) for name, lines in heard.items()}
    print("word error rates:", ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items()))
    for name, allowed in (("unquantised", UNQUANTISED), ("quantised", QUANTISED)):
        if rates[name] > rates["flite"] + allowed and not args.quick:
            raise SystemExit(
                f"gate: the word error rate of {name} is more than {allowed} above flite's; training on it is pointless"
            )


def spans(frames: corpus.Frames) -> list[slice]:
    return [slice(int(a), int(b)) for a, b in zip(frames.edges[:-1], frames.edges[1:], strict=True)]


def texts_directory(work: Path, settings: Settings) -> Path:
    """Write the checkpoint's JSON files and vocabulary, which define how prompts are written."""
    checkpoint.write_texts(work / "texts", settings)
    return work / "texts"


def run(work: Path, name: str, peak: float, warmup: int, args: argparse.Namespace) -> tuple[Job, Schedule]:
    """Return a job and its learning rate schedule.

    An annealed run is a copy of the endless one, taken when --anneal is first used, in another directory. A
    repeated command continues to the same end."""
    endless = work / f"job_{name}"
    if args.anneal is None:
        return Job(endless, args.pause_file), Schedule(peak, warmup, args.steps)
    annealed = work / f"job_{name}_annealed"
    if not (annealed / "end").exists():
        annealed.mkdir(exist_ok=True)
        shutil.copy(endless / "job.pt", annealed / "job.pt")
        step = torch.load(annealed / "job.pt", weights_only=True)["step"]
        (annealed / "end").write_text(str(step + args.anneal))
    end = int((annealed / "end").read_text())
    return Job(annealed, args.pause_file), Schedule(peak, warmup, end, args.anneal)


def train_decoder(work: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Step 5: train the decoder until the process is killed."""
    wave = np.memmap(work / "train" / "target.s16", dtype="<i2", mode="r")
    found = np.load(work / "train" / "codes.npy")[: len(wave) // features.FRAME]
    plan = decoder.Plan(log_every=10, is_compiled=False) if args.quick else decoder.Plan()
    model = Decoder(DecoderConfig.from_json(codec_config(settings)))
    job, schedule = run(work, "decoder", decoder.PEAK, decoder.WARMUP, args)
    decoder.train(model, Codebooks.load(work / "codebooks.pt"), found, wave, job, plan, schedule)


def train_talker(work: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Step 6: train the talker until the process is killed."""
    data = utterances(work, texts_directory(work, settings))
    config = describe(work / "texts")[0]
    plan = talker.Plan()
    if args.quick:
        plan = replace(plan, log_every=10, batch=4, is_compiled=False)
    model = talker.Training(Talker(config), config, data.num_phones, plan.is_compiled)
    job, schedule = run(work, "talker", talker.PEAK, talker.WARMUP, args)
    talker.train(model, Codebooks.load(work / "codebooks.pt"), data, job, plan, schedule)


def utterances(work: Path, texts: Path) -> talker.Utterances:
    """Return prompts exactly as the served model reads them, codes, and the byte and phone of each frame."""
    config, _, _, spec = describe(texts)
    writer, shelf, frames = (
        PromptWriter(config, texts, None),
        Shelf(work / "train"),
        corpus.Frames.load(work / "train"),
    )
    found = np.load(work / "train" / "codes.npy")
    spoken, phones, num_phones = aligned(work / "train" / "aligned.npz", shelf)
    rng = np.random.default_rng(SEED)
    prompts, starts = [], []
    for utterance in shelf.utterances:
        request = Request(text=utterance.text, language=checkpoint.LANGUAGE if rng.random() < 0.5 else None)
        script = writer(request, check(request, spec))
        prompts.append(np.array(script.pairs))
        starts.append(len(script.pairs) - 2 - script.text_tokens)  # after the text come its end and codec_bos
    lines = [found[at] for at in spans(frames)]
    return talker.Utterances(prompts, starts, lines, fitted(spoken, lines), fitted(phones, lines), num_phones)


def aligned(path: Path, shelf: Shelf) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Return the byte and phone of every utterance's frames, and the number of phones. Cached in a file."""
    if not path.exists():
        progress = counter("alignment", len(shelf.utterances))
        spoken, phones, num_phones = align.align(shelf.utterances, progress)
        edges = np.cumsum([len(frames) for frames in spoken])[:-1]
        part = path.with_suffix(".part.npz")
        np.savez(
            part, spoken=np.concatenate(spoken), phones=np.concatenate(phones), edges=edges, num=num_phones
        )
        part.replace(path)
    kept = np.load(path)
    return np.split(kept["spoken"], kept["edges"]), np.split(kept["phones"], kept["edges"]), int(kept["num"])


def fitted(values: list[np.ndarray], lines: list[np.ndarray]) -> list[np.ndarray]:
    """Fit lengths to the codes: rounding may differ by a frame at the end of an utterance."""
    return [
        np.pad(v, (0, max(0, len(c) - len(v))), mode="edge")[: len(c)]
        for v, c in zip(values, lines, strict=True)
    ]


def export(work: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Step 7: write a checkpoint of the annealed runs, or of the endless runs' running averages.

    With --trained, write what `remote` trained."""
    out = args.out or work / "voice"
    checkpoint.write_texts(out, settings)
    talkers = {
        name.removeprefix("talker."): p
        for name, p in trained(work, "talker", args.trained).items()
        if name.startswith("talker.")
    }
    checkpoint.write_talker(out, Talker(describe(out)[0]), talkers)
    checkpoint.write_decoder(out, trained(work, "decoder", args.trained))
    print(f"{out}: {sum(path.stat().st_size for path in out.rglob('*.safetensors')) / 1e6:.1f} MB of tensors")


def trained(work: Path, name: str, elsewhere: Path | None) -> dict[str, torch.Tensor]:
    if elsewhere is not None:
        state = torch.load(elsewhere / f"{name}.pt", weights_only=True)
        print(f"{elsewhere / name}.pt: step {state['step']}")
        return state["module"]
    annealed, endless = work / f"job_{name}_annealed" / "job.pt", work / f"job_{name}" / "job.pt"
    path = annealed if annealed.exists() else endless
    state = torch.load(path, weights_only=True)
    print(f"{path}: step {state['step']}, {state['cpu_s'] / 3600:.2f} CPU hours")
    return state["module" if annealed.exists() else "average"]


def score(work: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Step 8: measure how many words are understood.

    Copy synthesis is true codes with our decoder; speech is text with our talker and decoder. The same codes
    through the channel vocoder show which part makes the errors. With --url, only speech is measured, through
    a server."""
    import zoo

    if args.url is not None:
        heard_there(args.url, sentences.LINES[args.set][: args.count], args.seed)
        return
    family = zoo.load(args.out or work / "voice", device="cpu", dtype=torch.float32)
    assert isinstance(family, Qwen3TTS)
    shelf, frames = Shelf(work / args.set), corpus.Frames.load(work / args.set)
    codebooks, found = Codebooks.load(work / "codebooks.pt"), np.load(work / args.set / "codes.npy")
    heard: dict[str, list[str]] = {"copy synthesis": [], "speech": [], "speech, channel vocoder": []}
    for i, at in enumerate(spans(frames)[: args.count]):
        text = shelf.utterances[i].text
        copied = decode(family.codec.decoder, torch.from_numpy(found[at].astype(np.int64)))
        spoken = zoo.generate(
            family, Request(text=text, seed=args.seed + i, max_frames=2 * (at.stop - at.start))
        )
        vocoded = vocoder.speak(*codebooks.decode(spoken.frames.numpy()))
        lengths = f"{len(spoken.frames)} frames, flite {at.stop - at.start}"
        for name, samples in zip(heard, (copied, spoken.samples.numpy(), vocoded), strict=True):
            heard[name].append(judge.transcribe(samples, features.RATE_HZ))
        print(f"{text}\n   {lengths}: {' | '.join(lines[-1] for lines in heard.values())}", flush=True)
    texts = [utterance.text for utterance in shelf.utterances[: args.count]]
    rates = {name: judge.word_error_rate(texts, lines) for name, lines in heard.items()}
    print("word error rates:", ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items()))


def heard_there(url: str, texts: list[str], seed: int) -> None:
    import httpx
    import soundfile

    lines = []
    with httpx.Client(base_url=url, timeout=120) as client:
        for i, text in enumerate(texts):
            body = {"input": text, "voice": checkpoint.VOICE, "response_format": "wav", "seed": seed + i}
            answer = client.post("/v1/audio/speech", json=body)
            if answer.status_code != 200:
                raise SystemExit(f"{url} answered {answer.status_code}: {answer.text[:300]}")
            lines.append(judge.transcribe(*soundfile.read(io.BytesIO(answer.content), dtype="float32")))
            print(f"{text}\n   {lines[-1]}", flush=True)
    print(f"word error rate: {judge.word_error_rate(texts, lines):.3f}")


@torch.inference_mode()
def decode(model: Decoder, codes: torch.Tensor) -> np.ndarray:
    rows, start = torch.zeros(1, model.state_size), torch.zeros(1, dtype=torch.int64)
    return model(codes[None], rows, start, start + len(codes))[0][0].numpy()


def both(work: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Steps 5 and 6 to their end: train both parts side by side, then anneal both."""
    steps = {
        "decoder": args.steps or settings.decoder_steps,
        "talker": args.steps or settings.talker_steps,
    }
    anneal = min(args.steps or settings.anneal_steps, settings.anneal_steps)
    for last in ("--steps", "--anneal"):
        started = []
        for name, most in steps.items():
            command = [sys.executable, "-m", "train_a_voice", name, str(work)]
            command += [last, str(most if last == "--steps" else anneal)]
            command += ["--quick"] * args.quick
            started.append(subprocess.Popen(command))
        ends = [program.wait() for program in started]
        if any(ends):
            raise SystemExit(
                "training failed; its last checkpoint is kept, and the same command continues from there"
            )


def pack(work: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Write a folder with everything that `remote` trains from, and next to it the speech for scoring."""
    work.mkdir(parents=True, exist_ok=True)
    gather.gather(work, settings, args.out or work / "pack", counter)
    for name in SETS:
        Shelf(work / name).fill(
            sentences.LINES[name], counter(f"speech of {name}", len(sentences.LINES[name]))
        )
    codes(work, settings, args)


STEPS = {
    "speech": speech,
    "codes": codes,
    "gate": gate,
    "decoder": train_decoder,
    "talker": train_talker,
    "export": export,
    "score": score,
}
ALL = STEPS | {"decoder": both, "talker": lambda work, settings, args: None}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train_a_voice", description=__doc__)
    parser.add_argument(
        "step", choices=[*STEPS, "all", "pack"], help="step to run, in this order; `all` takes hours"
    )
    parser.add_argument("directory", type=Path, help="working directory, some 3 GB")
    parser.add_argument(
        "--quick", action="store_true", help="train a tiny voice on a few sentences, as a test"
    )
    parser.add_argument("--pause-file", type=Path, help="pause training while this file exists")
    parser.add_argument("--steps", type=int, help="end training after this many steps in total")
    parser.add_argument(
        "--anneal", type=int, help="copy the run and train this many more steps with a falling learning rate"
    )
    parser.add_argument(
        "--count", type=int, default=len(sentences.LINES["held_out"]), help="number of sentences to judge"
    )
    parser.add_argument("--sentences", type=int, help="speech, pack: number of sentences to speak")
    parser.add_argument("--set", choices=SETS, default="held_out", help="set of sentences to judge")
    parser.add_argument("--seed", type=int, default=0, help="score: seed of the first sentence")
    parser.add_argument(
        "--trained", type=Path, help="export: directory with talker.pt and decoder.pt from `remote`"
    )
    parser.add_argument("--out", type=Path, help="directory of the checkpoint; pack: the packed folder")
    parser.add_argument(
        "--url", help="score: address of a server with the voice, such as http://127.0.0.1:8000"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    settings = QUICK if args.quick else FULL
    if args.sentences is not None:
        settings = replace(settings, num_sentences=args.sentences)
    for step in (ALL if args.step == "all" else {args.step: (STEPS | {"pack": pack})[args.step]}).values():
        step(args.directory, settings, args)


if __name__ == "__main__":
    main()
