"""Train a small voice of your own. See the README.md in this folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from train_a_voice import checkpoint, settings, train
from train_a_voice.pack import LAST

SEED = 1


def pack(args: argparse.Namespace) -> None:
    from train_a_voice import pack

    sizes = settings.QUICK if args.quick else settings.FULL
    if args.sentences is not None:
        sizes = replace(sizes, num_sentences=args.sentences)
    folder = pack.pack(args.work, sizes)
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.1f} MB")


def check_packed(folder: Path) -> None:
    if not (folder / LAST).exists():
        raise SystemExit(f"{folder} is no packed folder; `python -m train_a_voice pack WORK` makes WORK/pack")


def run(args: argparse.Namespace) -> None:
    check_packed(args.folder)
    raise SystemExit(train.train(args))


def export(args: argparse.Namespace) -> None:
    from zoo.qwen3_tts import describe
    from zoo.qwen3_tts.model import Talker

    train.check_parts(args.out, ("talker", "decoder"))
    parts = {name: torch.load(args.out / f"{name}.pt", weights_only=True) for name in ("talker", "decoder")}
    for name, state in parts.items():
        print(f"{name}: step {state['step']}, {state['share']:.0%} of its run")
    heads = [name for name in parts["talker"]["module"] if name.startswith("talker.depth.heads.")]
    checkpoint.write_texts(args.voice, settings.settings_of(len(heads) + 1))
    helped = parts["talker"]["module"].items()
    tensors = {name.removeprefix("talker."): p for name, p in helped if name.startswith("talker.")}
    checkpoint.write_talker(args.voice, Talker(describe(args.voice)[0]), tensors)
    checkpoint.write_decoder(args.voice, parts["decoder"]["module"])
    size = sum(path.stat().st_size for path in args.voice.rglob("*.safetensors"))
    print(f"{args.voice}: {size / 1e6:.1f} MB of tensors")


def reopen(args: argparse.Namespace) -> None:
    try:
        parts = checkpoint.read(args.voice)
    except ValueError as error:
        raise SystemExit(f"reopen: {error}; name the directory of an exported voice") from None
    args.out.mkdir(parents=True, exist_ok=True)
    for name, tensors in parts.items():
        module = {f"talker.{key}": x for key, x in tensors.items()} if name == "talker" else tensors
        torch.save({"step": 0, "share": 1.0, "module": module}, args.out / f"{name}.pt")


def score(args: argparse.Namespace) -> None:
    from train_a_voice import score

    if args.voice is None and args.url is None and not args.codes:
        raise SystemExit("score: name the exported voice, or use --codes or --url")
    if args.url is None:
        check_packed(args.work / "pack")
    texts = score.held_out(args.count)
    print(score.score(args.work, args.voice, args.url, texts, args.seed, args.processes))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train_a_voice", description=__doc__)
    steps = parser.add_subparsers(required=True, metavar="STEP")

    def step(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = steps.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    one = step("pack", pack, "speak sentences and write what training needs to WORK/pack")
    one.add_argument("work", type=Path, metavar="WORK", help="working directory")
    one.add_argument(
        "--sentences", type=train.count, help=f"how many (default: {settings.FULL.num_sentences})"
    )
    one.add_argument("--quick", action="store_true", help="make a tiny voice from a few sentences, as a test")

    train.add_arguments(step("train", run, "train talker and decoder from a packed folder"))

    one = step("export", export, "write a checkpoint that `zoo serve` loads")
    one.add_argument("out", type=Path, metavar="OUT", help="directory of the training")
    one.add_argument("voice", type=Path, metavar="VOICE", help="directory of the checkpoint")

    one = step("reopen", reopen, "write the parts of an exported voice to OUT, for `train --begin OUT`")
    one.add_argument("voice", type=Path, metavar="VOICE", help="directory of the checkpoint")
    one.add_argument("out", type=Path, metavar="OUT", help="directory for talker.pt and decoder.pt")

    one = step("score", score, "print word error rates by stage and by length of the text")
    one.add_argument("work", type=Path, metavar="WORK", help="working directory of `pack`")
    one.add_argument("voice", type=Path, nargs="?", metavar="VOICE", help="directory of the checkpoint")
    one.add_argument("--codes", action="store_true", help="measure the stages that need no training")
    one.add_argument("--url", help="measure a server, such as http://127.0.0.1:8000, instead")
    one.add_argument("--count", type=train.count, help="number of sentences (default: all)")
    one.add_argument("--seed", type=int, default=0, help="seed of the first sentence")
    one.add_argument("--processes", type=train.count, help="number of processes (default: one for each core)")

    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    try:
        args.run(args)
    except ValueError as error:
        if vars(args).get("role", "all") != "all":  # the log of a program gets all of an error
            raise
        raise SystemExit(f"train_a_voice: {error}") from None


if __name__ == "__main__":
    main()
