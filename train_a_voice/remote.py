"""Train a voice in minutes on a machine with a GPU, which needs neither flite nor a network.

`pack` writes a folder of some 28 MB. With it, `python -m train_a_voice.remote FOLDER OUT --minutes
7` trains talker and decoder side by side, while the machine's other cores make more speech with the flite in
the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from train_a_voice import checkpoint, dense_decoder, dense_talker, forge, library, sentences
from train_a_voice.align import Aligner
from train_a_voice.codes import Codebooks
from train_a_voice.lines import Lines
from train_a_voice.pool import Noise, Pool
from train_a_voice.settings import FULL, QUICK, Settings, codec_config
from train_a_voice.sprint import Clock, Log, pick_device
from zoo.qwen3_tts import describe
from zoo.qwen3_tts.codec import Decoder, DecoderConfig
from zoo.qwen3_tts.model import Talker

SEED = 2  # of the sentences that are made there
NUM_MORE = 400_000  # most sentences that are made there
WAVES = 36  # parts whose samples the decoder learns
FIRST_WAVES = 8  # parts that the decoder's training waits for
WAIT_S = 90.0  # longest wait for them; then it learns from the packed codes
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LATE_S = 25.0  # time for a training to write its result after the end
POOL_UTTERANCES, POOL_FRAMES = 400_000, 14_000_000


def pack(
    folder: Path, found: list[Lines], unseen: Lines, codebooks: Codebooks, aligner: Aligner, lexicon: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Lines.join(found).save(folder / "lines.npz")
    unseen.save(folder / "unseen.npz")
    np.savez_compressed(
        folder / "codebooks.npz", mel=codebooks.mel.half().numpy(), shapes=codebooks.shapes.numpy()
    )
    aligner.save(folder / "aligner.npz")
    (folder / "lexicon.xz").write_bytes(lzma.compress(lexicon.read_bytes()))
    with tarfile.open(folder / "flite.tar.xz", "w:xz") as archive:
        for name in library.OBJECTS:
            archive.add((library.SYSTEM / name).resolve(), name)


def books(folder: Path) -> Codebooks:
    kept = np.load(folder / "codebooks.npz")
    return Codebooks(torch.from_numpy(kept["mel"]).float(), torch.from_numpy(kept["shapes"]).float())


# --- more speech during the training ---


def make_part(index: int, texts: list[str], folder: Path, scratch: Path, has_wave: bool) -> int:
    path = forge.path_of(scratch / "parts", index)
    forge.make(texts, path, scratch / "flite")
    part, aligner = forge.Part.load(path), _aligner(folder)
    wave = scratch / "waves" / f"{index:05d}.npy"
    if has_wave:
        hold = wave.with_suffix(".part.npy")
        np.save(hold, dense_decoder.wave_of(part, books(folder)))
        os.replace(hold, wave)
    none = np.zeros((len(part.cycles), 1), np.int16)
    found = Lines.of(part, none, aligner)
    hold = scratch / "aligned" / f"{index:05d}.part.npz"
    np.savez(hold, spoken=found.spoken, phones=found.phones)
    os.replace(hold, scratch / "aligned" / f"{index:05d}.npz")
    return index


_kept: dict[Path, Aligner] = {}


def _aligner(folder: Path) -> Aligner:
    if folder not in _kept:
        _kept[folder] = Aligner.load(folder / "aligner.npz")
    return _kept[folder]


def make_more(folder: Path, scratch: Path, args: argparse.Namespace) -> None:
    """Make speech, its features and alignment, part by part, until the end of the run."""
    with tarfile.open(folder / "flite.tar.xz") as archive:
        archive.extractall(scratch / "flite", filter="data")
    raw = scratch / "lexicon.txt"
    raw.write_bytes(lzma.decompress((folder / "lexicon.xz").read_bytes()))
    lexicon = sentences.Lexicon.load(raw)
    apart = frozenset(sentences.LINES["held_out"] + sentences.LINES["development"])
    number = 40 if args.quick else NUM_MORE
    texts = sentences.generate(number, lexicon, args.seed, apart)
    size = 20 if args.quick else forge.PART
    pieces = [texts[i : i + size] for i in range(0, len(texts), size)]
    began_s, done = time.time(), 0
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        waiting = set()
        for index, piece in enumerate(pieces):
            waiting.add(pool.submit(make_part, index, piece, folder, scratch, index < WAVES))
            if len(waiting) < 2 * args.processes and index + 1 < len(pieces):
                continue
            for one in as_completed(list(waiting)):
                waiting.remove(one)
                done += len(pieces[one.result()])
                if time.time() > args.end - 20:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return
                if len(waiting) < 2 * args.processes and index + 1 < len(pieces):
                    break
            print(f"{done} more sentences, {time.time() - began_s:.0f} s", flush=True)


class Coming:
    """New parts since the last look."""

    def __init__(self, scratch: Path, folder: Path, device: torch.device):
        self.scratch, self.seen = scratch, set[str]()
        self.codebooks = books(folder).to(device)

    def parts(self, kind: str, most: int | None = None) -> list[Path]:
        there = sorted((self.scratch / kind).glob("?????.np[yz]"))
        fresh = [path for path in there if path.name not in self.seen][:most]
        self.seen |= {path.name for path in fresh}
        return fresh

    def codes(self, part: forge.Part) -> np.ndarray:
        return self.codebooks.encode(
            part.mel.astype(np.float32), part.cycles, part.voicing.astype(np.float32)
        )

    def lines(self, most: int) -> list[Lines]:
        found = []
        for path in self.parts("aligned", most):
            part = forge.Part.load(self.scratch / "parts" / path.name)
            kept = np.load(path)
            found.append(Lines(part.texts, part.edges, self.codes(part), kept["spoken"], kept["phones"]))
        return found

    def sounds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        for path in self.parts("waves"):
            part = forge.Part.load(self.scratch / "parts" / path.with_suffix(".npz").name)
            found.append((self.codes(part), np.load(path)))
        return found


# --- the trainings ---


def going_on(plan: dense_talker.Plan) -> dense_talker.Plan:
    """Return a plan for continuing another run: less noise, and more own draws."""
    noise = Noise(0.03, 0.06, 0.015)
    return replace(
        plan, peak=1e-3, own_share=0.4, own_from=0.0, own_temperature=0.4, noise=noise, short_until=0.0
    )


def begin(module: torch.nn.Module, path: Path | None) -> Callable[[], None]:
    """Return a function that loads the module's parameters from `path` after its initialisation."""

    def load() -> None:
        if path is not None:
            missing, extra = module.load_state_dict(
                torch.load(path, weights_only=True)["module"], strict=False
            )
            missing = [name for name in missing if name in dict(module.named_parameters())]
            assert not missing and not extra, (
                f"{path} belongs to another voice: missing {missing}, unexpected {extra}"
            )

    return load


def train_talker(folder: Path, scratch: Path, settings: Settings, args: argparse.Namespace) -> None:
    device, codebooks = pick_device(args.device), books(folder)
    checkpoint.write_texts(scratch / "texts_talker", settings)
    config = describe(scratch / "texts_talker")[0]
    plan, room = dense_talker.Plan(), (POOL_UTTERANCES, POOL_FRAMES)
    if args.quick:
        plan, room = replace(plan, positions=512, log_s=1.0, check_s=2.0, warmup=10), (70_000, 3_000_000)
    if args.begin is not None:
        plan = going_on(plan)
    given = Lines.load(folder / "lines.npz")
    pool = Pool(scratch / "texts_talker", codebooks, device, *room)
    pool.add(given, 0)
    hidden = Lines.load(folder / "unseen.npz")
    unseen = Pool(scratch / "texts_talker", codebooks, device, len(hidden.texts), len(hidden.codes))
    unseen.add(hidden, 0)
    aligner = Aligner.load(folder / "aligner.npz")
    training = dense_talker.Dense(Talker(config), config, len(aligner.phones))
    coming = Coming(scratch, folder, device)

    def grow(pool: Pool) -> int:
        return sum(pool.add(found, pool.count) for found in coming.lines(8))

    print(f"{pool.count} utterances, {pool.num_frames} frames, on {device}", flush=True)
    dense_talker.train(
        training,
        codebooks,
        pool,
        unseen,
        plan,
        Clock(args.minutes, args.end),
        Log(args.out / "talker_log.jsonl"),
        args.out / "talker.pt",
        grow,
        records=not args.no_graphs,
        begin=begin(training, args.begin and args.begin / "talker.pt"),
    )


def train_decoder(folder: Path, scratch: Path, settings: Settings, args: argparse.Namespace) -> None:
    device, codebooks = pick_device(args.device), books(folder)
    plan = dense_decoder.Plan() if args.begin is None else dense_decoder.Plan(peak=7e-4)
    if args.quick:
        plan = replace(plan, batch=2, log_s=1.0, room=5_000)
    sounds, coming = dense_decoder.Sounds(plan, codebooks, device), Coming(scratch, folder, device)

    def grow(sounds: dense_decoder.Sounds) -> bool:
        fresh = coming.sounds()
        for codes, wave in fresh:
            sounds.add(codes, wave)
        return bool(fresh)

    least, until_s = (1 if args.quick else FIRST_WAVES), time.time() + (20 if args.quick else WAIT_S)
    while len(list((scratch / "waves").glob("?????.npy"))) < least and time.time() < until_s:
        time.sleep(0.5)
    if not grow(sounds):
        print("no speech was made in time: the decoder learns from the packed codes", flush=True)
        sounds.add(*spoken_codes(Lines.load(folder / "lines.npz"), codebooks, 100 if args.quick else 3_000))
    print(f"{sounds.num} frames on {device}", flush=True)
    model = Decoder(DecoderConfig.from_json(codec_config(settings)))
    dense_decoder.train(
        model,
        codebooks,
        sounds,
        plan,
        Clock(args.minutes, args.end),
        Log(args.out / "decoder_log.jsonl"),
        args.out / "decoder.pt",
        grow,
        records=not args.no_graphs,
        begin=begin(model, args.begin and args.begin / "decoder.pt"),
    )


def spoken_codes(found: Lines, codebooks: Codebooks, count: int) -> tuple[np.ndarray, np.ndarray]:
    from train_a_voice import vocoder

    found = found.first(count)
    waves = [
        vocoder.speak(*codebooks.decode(found.codes[int(a) : int(b)]))
        for a, b in zip(found.edges[:-1], found.edges[1:], strict=True)
    ]
    return found.codes, (np.clip(np.concatenate(waves), -1, 1) * 32767).astype("<i2")


# --- all of it ---


def run_all(folder: Path, scratch: Path, args: argparse.Namespace) -> int:
    """Run three programs side by side. A training that fails is restarted once, without graphs."""
    command = [sys.executable, "-m", "train_a_voice.remote", str(folder), str(args.out)]
    command += ["--end", str(args.end), "--scratch", str(scratch), "--processes", str(args.processes)]
    command += ["--quick"] * args.quick + (["--device", args.device] if args.device else [])
    command += ["--seed", str(args.seed)] + (["--begin", str(args.begin)] if args.begin else [])

    def start(role: str, *more: str) -> subprocess.Popen[bytes]:
        program, env = [*command, "--role", role, *more], os.environ | ONE_THREAD
        with open(args.out / f"{role}.txt", "ab") as log:
            return subprocess.Popen(
                program, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env
            )

    programs = {role: start(role) for role in ("more", "decoder", "talker")}
    again: set[str] = set()
    while any(programs[role].poll() is None for role in ROLES) and time.time() < args.end + LATE_S:
        time.sleep(0.5)
        for role in ROLES:
            if programs[role].poll() not in (None, 0) and role not in again and args.end - time.time() > 30:
                print(f"{role} failed and restarts without graphs", flush=True)
                again.add(role)
                programs[role] = start(role, "--no-graphs")
    for program in programs.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)  # and the processes that make speech
    ends = {role: programs[role].wait() for role in ROLES}
    print(ends, flush=True)
    return int(any(ends.values()))


ROLES: dict[str, Callable[..., None]] = {"talker": train_talker, "decoder": train_decoder}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train_a_voice.remote", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder from `pack`")
    parser.add_argument("out", type=Path, help="directory for talker.pt, decoder.pt and the logs")
    parser.add_argument("--minutes", type=float, default=7.0, help="total time in minutes")
    parser.add_argument(
        "--processes",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 3),
        help="number of processes that make speech",
    )
    parser.add_argument("--device", help="cuda or cpu (default: cuda if available)")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the new sentences")
    parser.add_argument("--begin", type=Path, help="continue from talker.pt and decoder.pt in this directory")
    parser.add_argument(
        "--no-graphs",
        action="store_true",
        help="run every step eagerly instead of recording it as a CUDA graph",
    )
    parser.add_argument("--quick", action="store_true", help="train a tiny voice, as a test")
    parser.add_argument("--role", choices=["all", "more", *ROLES], default="all", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.end = args.end or time.time() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    settings = replace(QUICK if args.quick else FULL, mel_levels=len(books(args.folder).mel))
    torch.manual_seed(0)
    if args.role == "all":
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(
            dir=memory if memory.is_dir() and not args.quick else None
        ) as scratch:
            for name in ("parts", "waves", "aligned"):
                (Path(scratch) / name).mkdir()
            return run_all(args.folder, Path(scratch), args)
    if args.role == "more":
        make_more(args.folder, args.scratch, args)
    else:
        ROLES[args.role](args.folder, args.scratch, settings, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
