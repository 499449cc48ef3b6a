"""Train talker and decoder side by side, while other processes make more speech with the flite in the packed
folder. It needs no network and no program of flite.

A GPU takes minutes. On a CPU the batches are small, and a voice takes hours.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train_a_voice import checkpoint, decoder, sentences, sprint, talker, vocoder
from train_a_voice.align import Aligner
from train_a_voice.codes import Codebooks
from train_a_voice.lines import Lines
from train_a_voice.pack import APART, SPAWN, make_lines
from train_a_voice.pool import Noise, Pool
from train_a_voice.settings import FULL, QUICK, Settings, codec_config
from zoo.nn.packed import can_be_packed
from zoo.qwen3_tts import describe
from zoo.qwen3_tts.codec import Decoder, DecoderConfig
from zoo.qwen3_tts.model import Talker

SEED = 2  # of the sentences that are made there
MORE = 200  # sentences of a part; an even number, so the speakers' turns go on
MOST_PARTS = 2_000  # their seeds differ, and are above those of the packed folder
WAVES = 48  # parts whose samples the decoder learns: 400,000 frames
FIRST_WAVES = 12  # parts that a GPU's training of the decoder waits for
WAIT_S = 90.0  # longest wait for them; then it learns from the packed codes
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
COMPILE_S = 300.0  # shortest run on a CPU that compiles the decoder: a minute's work, which halves its steps
RESTART_S = 30.0  # shortest time for which a failed training is started again
LATE_S = 120.0  # time for a training to look at unseen sentences and write its result after the end
POOL_UTTERANCES, POOL_FRAMES = 400_000, 18_000_000
SPARE_UTTERANCES, SPARE_FRAMES = 30_000, 2_000_000  # room for more on a CPU
NEW_NOISE = Noise(0.03, 0.06, 0.015)  # of a run that trains a finished voice further


# --- more speech during the training ---


def make_more(folder: Path, scratch: Path, args: argparse.Namespace) -> None:
    """Make lines and samples, part by part, until the end of the run. The first parts have samples."""
    with tarfile.open(folder / "flite.tar.xz") as archive:
        archive.extractall(scratch / "flite", filter="data")
    raw = scratch / "lexicon.txt"
    raw.write_bytes(lzma.decompress((folder / "lexicon.xz").read_bytes()))
    lexicon = sentences.Lexicon.load(raw)
    size, number = (20, 2) if args.is_quick else (MORE, WAVES if args.only == "decoder" else MOST_PARTS)
    began_s, done = time.time(), 0
    with ProcessPoolExecutor(args.processes, mp_context=SPAWN) as pool:
        waiting = set()
        for index in range(number):
            texts = sentences.generate(size, lexicon, MOST_PARTS * args.seed + index, APART)
            name = f"{index:05d}.np"
            wave = scratch / "waves" / f"{name}y" if index < WAVES else None
            path = scratch / "lines" / f"{name}z"
            waiting.add(pool.submit(make_lines, texts, path, folder, scratch / "flite", wave))
            if len(waiting) == 2 * args.processes or index + 1 == number:
                ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                done += sum(one.result() for one in ready)
                print(f"{done} more sentences, {time.time() - began_s:.0f} s", flush=True)
            if time.time() > args.end - 20:
                pool.shutdown(wait=False, cancel_futures=True)
                return


class Coming:
    """New files since the last look."""

    def __init__(self, scratch: Path, kind: str):
        self.directory, self.seen = scratch / kind, set[Path]()

    def __call__(self, most: int | None = None) -> list[Path]:
        there = sorted(self.directory.glob("?????.np[yz]"))
        fresh = [path for path in there if path not in self.seen][:most]
        self.seen |= set(fresh)
        return fresh


# --- the trainings ---


class Begin:
    """The beginning of a run: anew, where another one stopped, or with the parameters of a finished one.

    is_further: whether the run trains a finished voice further."""

    def __init__(self, path: Path | None):
        self.state = None if path is None else torch.load(path, weights_only=True)
        share = 0.0 if self.state is None else self.state["share"]
        was_further = self.state is not None and self.state.get("is_further", False)
        self.is_further = share >= 1 or was_further
        self.share = 0.0 if share >= 1 else share

    def load(self, module: torch.nn.Module) -> None:
        if self.state is None:
            return
        missing, extra = module.load_state_dict(self.state["module"], strict=False)
        missing = [name for name in missing if name in dict(module.named_parameters())]
        # a checkpoint lacks the helpers of a training, which begin anew
        missing = [name for name in missing if not name.startswith(talker.HELPERS)]
        assert not missing and not extra, f"another voice: missing {missing}, unexpected {extra}"


def plan_of(plan: Any, on_cpu: dict[str, Any], device: torch.device) -> Any:
    if device.type != "cpu":
        return plan
    # without bf16 arithmetic, a product in bf16 takes many times as long as in fp32
    has_bf16 = can_be_packed(torch.empty(1), torch.bfloat16)
    return replace(plan, **on_cpu, dtype=torch.bfloat16 if has_bf16 else torch.float32)


def train_talker(folder: Path, scratch: Path, settings: Settings, args: argparse.Namespace) -> None:
    device, codebooks = sprint.pick_device(args.device), Codebooks.load(folder / "codebooks.npz")
    start = Begin(args.begin and args.begin / "talker.pt")
    checkpoint.write_texts(scratch / "texts", settings)
    config = describe(scratch / "texts")[0]
    plan = plan_of(talker.Plan(), talker.ON_CPU, device)
    if args.is_quick:
        plan = replace(plan, positions=512, log_s=0.5, check_s=2.0, warmup=10)
    if start.is_further:
        plan = replace(plan, peak=0.4 * plan.peak, own_share=0.4, own_from=0.0, own_temperature=0.4)
        plan = replace(plan, noise=NEW_NOISE, short_until=0.0)
    given, hidden = Lines.load(folder / "lines.npz"), Lines.load(folder / "unseen.npz")
    room = (POOL_UTTERANCES, POOL_FRAMES)
    if device.type == "cpu":
        room = (len(given.texts) + SPARE_UTTERANCES, len(given.codes) + SPARE_FRAMES)
    pool = Pool(scratch / "texts", codebooks, device, *room)
    pool.add(given, 0)
    unseen = Pool(scratch / "texts", codebooks, device, len(hidden.texts), len(hidden.codes))
    unseen.add(hidden, 0)
    phones = Aligner.load(folder / "aligner.npz").phones
    training = talker.Training(Talker(config), config, len(phones), codebooks)
    coming = Coming(scratch, "lines")
    print(f"{pool.count} utterances, {pool.num_frames} frames, on {device}", flush=True)
    talker.train(
        training,
        codebooks,
        pool,
        unseen,
        plan,
        sprint.Clock(args.end, start.share, start.is_further),
        sprint.Log(args.out / "talker_log.jsonl"),
        args.out / "talker.pt",
        lambda pool: sum(pool.add(Lines.load(path), pool.count) for path in coming(20)),
        records=not args.no_graphs,
        begin=lambda: start.load(training),
    )


def train_decoder(folder: Path, scratch: Path, settings: Settings, args: argparse.Namespace) -> None:
    device, codebooks = sprint.pick_device(args.device), Codebooks.load(folder / "codebooks.npz")
    start = Begin(args.begin and args.begin / "decoder.pt")
    plan = plan_of(decoder.Plan(), decoder.ON_CPU, device)
    if args.is_quick:
        plan = replace(plan, batch=2, frames=8, log_s=0.5, room=5_000)
    if start.is_further:
        plan = replace(plan, peak=plan.peak / 2)
    if device.type == "cpu" and args.end - time.time() > COMPILE_S and shutil.which("g++"):
        plan = replace(plan, is_compiled=not args.is_quick)
    sounds, coming = decoder.Sounds(plan, codebooks, device), Coming(scratch, "lines")

    def grow(sounds: decoder.Sounds) -> bool:
        before = sounds.num
        for path in coming():  # the lines of a part are written after its samples
            wave = scratch / "waves" / f"{path.stem}.npy"
            if wave.exists():
                sounds.add(Lines.load(path).codes, np.load(wave))
        return sounds.num > before

    least = 1 if device.type == "cpu" else FIRST_WAVES
    until_s = time.time() + (min(WAIT_S, (args.end - time.time()) / 4))
    while len(list((scratch / "lines").glob("?????.npz"))) < least and time.time() < until_s:
        time.sleep(0.2)
    if not grow(sounds):
        print("no speech was made in time: the decoder learns from the packed codes", flush=True)
        given = Lines.load(folder / "lines.npz").first(20 if args.is_quick else 3_000)
        for codes, speaker in zip(np.split(given.codes, given.edges[1:-1]), given.speakers, strict=True):
            wave = vocoder.speak(*codebooks.decode(codes), int(speaker))
            sounds.add(codes, decoder.to_int16(wave))
    print(f"{sounds.num} frames on {device}", flush=True)
    model = Decoder(DecoderConfig.from_json(codec_config(settings)))
    decoder.train(
        model,
        codebooks,
        sounds,
        plan,
        sprint.Clock(args.end, start.share, start.is_further),
        sprint.Log(args.out / "decoder_log.jsonl"),
        args.out / "decoder.pt",
        grow,
        records=not args.no_graphs,
        begin=lambda: start.load(model),
    )


# --- all of it ---


def command(args: argparse.Namespace, scratch: Path, role: str) -> list[str]:
    """Return the command of a program that plays a role until args.end."""
    line = [sys.executable, "-m", "train_a_voice", "train", str(args.folder), str(args.out)]
    line += ["--end", str(args.end), "--scratch", str(scratch), "--processes", str(args.processes)]
    line += ["--device", args.device] if args.device else []
    line += ["--begin", str(args.begin)] if args.begin else []
    line += ["--no-graphs"] if args.no_graphs else []
    line += ["--only", args.only] if args.only else []
    return [*line, "--seed", str(args.seed), "--role", role]


def run_all(scratch: Path, args: argparse.Namespace) -> int:
    """Run the programs side by side. A training that fails continues once, without graphs."""
    began_s, again, roles = time.time(), set[str](), [args.only] if args.only else list(ROLES)

    def start(role: str, *more: str) -> subprocess.Popen[bytes]:
        line, env = [*command(args, scratch, role), *more], os.environ | ONE_THREAD
        with open(args.out / f"{role}.txt", "ab") as log:
            return subprocess.Popen(
                line, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env
            )

    programs = {role: start(role) for role in ("more", *roles)}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the programs end, too
    try:
        while any(programs[role].poll() is None for role in roles) and time.time() < args.end + LATE_S:
            time.sleep(0.2)
            if programs["more"].poll() not in (None, 0) and "more" not in again:
                again.add("more")
                print(f"no more sentences are made: see {args.out / 'more.txt'}", flush=True)
            for role in roles:
                is_late = args.end - time.time() < RESTART_S
                if programs[role].poll() in (None, 0) or role in again or is_late:
                    continue
                print(f"{role} failed and continues without graphs", flush=True)
                again.add(role)
                state = args.out / f"{role}.pt"
                begin = ["--begin", str(args.out)]
                is_ours = state.exists() and state.stat().st_mtime > began_s
                programs[role] = start(role, "--no-graphs", *(begin if is_ours else []))
    finally:
        signal.signal(signal.SIGTERM, before)
        for program in programs.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # and the processes that make speech
    ends = {role: programs[role].wait() for role in roles}
    print(ends, flush=True)
    return int(any(ends.values()))


ROLES: dict[str, Callable[..., None]] = {"talker": train_talker, "decoder": train_decoder}


def count(text: str) -> int:
    """Return a whole number from 1 on, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="PACK", help="folder from `pack`")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="directory for talker.pt, decoder.pt and the logs"
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="total time in minutes")
    cores = max(1, (os.cpu_count() or 2) - 3)
    parser.add_argument("--processes", type=count, default=cores, help="number of processes that make speech")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    parser.add_argument("--seed", type=count, default=SEED, help="seed of the new sentences")
    begin = "continue the run in this directory if it was stopped; train its voice further if it ended"
    parser.add_argument("--begin", type=Path, help=begin)
    only = "train one part; --begin names the directory that has the other one"
    parser.add_argument("--only", choices=list(ROLES), help=only)
    graphs = "run every step eagerly instead of recording it as a CUDA graph"
    parser.add_argument("--no-graphs", action="store_true", help=graphs)
    parser.add_argument("--role", choices=["all", "more", *ROLES], default="all", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)


def keep_others(args: argparse.Namespace) -> None:
    """Copy the parts that are not trained from the earlier run, for `export`."""
    others = [f"{role}.pt" for role in ROLES if role != args.only]
    if args.begin is None or not all((args.begin / name).exists() for name in others):
        raise SystemExit(f"train: --only {args.only} needs --begin with a directory that has {others[0]}")
    for name in others:
        if args.begin.resolve() != args.out.resolve():
            shutil.copyfile(args.begin / name, args.out / name)


def check_parts(folder: Path, roles: Iterable[str]) -> None:
    """Raise ValueError if a folder lacks the parts of a training."""
    for role in roles:
        if not (folder / f"{role}.pt").exists():
            raise ValueError(f"{folder} has no {role}.pt; name the directory of a training")


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what would fail in the log of a role."""
    if args.minutes <= 0:
        raise ValueError(f"--minutes {args.minutes:g} is no time")
    sprint.pick_device(args.device)
    if args.begin is not None:
        check_parts(args.begin, [args.only] if args.only else ROLES)


def train(args: argparse.Namespace) -> int:
    """Train a voice, or play one role in it. Return 0 if both trainings ended well."""
    if args.role == "all":
        check(args)
    args.end = args.end or time.time() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only and args.role == "all":
        keep_others(args)
    levels = len(Codebooks.load(args.folder / "codebooks.npz").mel)
    args.is_quick = levels == QUICK.mel_levels
    settings = QUICK if args.is_quick else FULL
    torch.manual_seed(0)
    if args.role == "more":
        make_more(args.folder, args.scratch, args)
    elif args.role != "all":
        if args.role == args.only:  # nothing else trains
            torch.set_num_threads(os.cpu_count() or 1)
        ROLES[args.role](args.folder, args.scratch, settings, args)
    else:
        memory = Path("/dev/shm")
        is_large = memory.is_dir() and not args.is_quick
        with tempfile.TemporaryDirectory(dir=memory if is_large else None) as scratch:
            for name in ("lines", "waves"):
                (Path(scratch) / name).mkdir()
            return run_all(Path(scratch), args)
    return 0
