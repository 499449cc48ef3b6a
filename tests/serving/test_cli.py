"""The command `zoo`, run as a user runs it."""

import json
import os
import re
import socket
import subprocess
import sys
import wave
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import rich.console
import shell
import soundfile
import torch
import typer
from shell import ROOT

from serving.audio.loudness import loudness_of
from serving.cli.common import COMMANDS, plural, print_numbers
from serving.cli.run import app
from serving.engine.job import NO_AUDIO
from serving.http.decode import decode
from zoo.contract import Speech


@pytest.fixture(scope="module")
def zoo():
    return shell.zoo


def process(*arguments):
    command = [sys.executable, "-m", "serving", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def refused(done):
    """Return the single stderr line of a command that was refused."""
    assert done.returncode == 2, done
    assert done.stdout == "" and done.stderr.startswith("zoo: ") and done.stderr.count("\n") == 1, done
    return done.stderr


@pytest.fixture(scope="module")
def checkpoint(zoo, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli") / "demo"
    done = zoo("demo-checkpoint", "qwen3_tts", directory, "--seed", 3)
    assert done.returncode == 0, done.stderr
    return directory


def test_help_does_not_wait_for_torch():
    done = process("--help")
    names = ("serve", "say", "inspect", "demo-checkpoint")
    assert done.returncode == 0 and all(name in done.stdout for name in names)
    imported = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, serving.cli.run, serving.supervisor, serving.http.app; print('torch' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert imported.stdout == "False\n"  # importing torch would make it slow


def test_an_interrupt_while_packages_are_imported_is_quiet(monkeypatch, zoo):
    class Interrupted:
        def find_spec(self, name, *_):
            if name == "serving.cli.run":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "serving.cli.run", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    done = zoo("--help")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "command", ["serve", "say", "chat", "batch", "load", "wyoming", "inspect", "demo-checkpoint", "voices"]
)
def test_every_command_has_help(zoo, command):
    done = zoo(command, "--help")
    assert done.returncode == 0 and "Usage: zoo " + command in done.stdout


def test_help_has_no_tags_which_a_terminal_would_leave_out():
    command = typer.main.get_command(app)
    for name, child in command.commands.items():
        for param in child.params:
            assert "<" not in (getattr(param, "help", None) or ""), (name, param.name)


def test_zoo_alone_lists_its_commands(zoo):
    done = zoo()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == zoo("--help").stdout


def test_help_lists_the_commands_in_a_useful_order(zoo):
    listed = re.findall(r"^│ ([a-z][a-z-]+) ", zoo("--help").stdout, re.M)
    assert tuple(listed) == COMMANDS


def test_the_help_of_serve_has_panels(zoo):
    panels = re.findall(r"^╭─ (\w+(?: \w+)*) ─", zoo("serve", "--help").stdout, re.M)
    assert panels == [
        "Arguments",
        "Options",
        "Model",
        "Models on demand",
        "Memory",
        "Latency",
        "Limits",
        "Security",
        "Replicas",
        "Long works",
        "Logs",
    ]


@pytest.mark.parametrize(("count", "text"), [(0, "0 entries"), (1, "1 entry"), (2, "2 entries")])
def test_counts_have_the_right_plural(count, text):
    assert plural(count, "entry", "entries") == text


def test_versions_are_printed_without_loading_a_model(zoo):
    done = zoo("--version")
    assert done.returncode == 0
    assert re.fullmatch(
        rf"speechzoo \S+, torch {re.escape(metadata.version('torch'))}, Python 3\.\d+\.\S+\n", done.stdout
    )


def test_the_default_model_is_the_small_voice(zoo):
    done = zoo("inspect", "--json")
    facts = json.loads(done.stdout)
    assert (facts["family"], facts["voices"]) == ("qwen3_tts", ["rms", "slt"]), done.stderr


@pytest.mark.parametrize("terminal", [80, 120, None])
def test_a_table_of_numbers_is_never_cut(capsys, monkeypatch, terminal):
    """A narrow terminal gets the rows as columns; a file gets lines of any width."""
    console = partial(rich.console.Console, force_terminal=terminal is not None, color_system=None)
    monkeypatch.setattr("rich.console.Console", console)
    monkeypatch.setenv("COLUMNS", str(terminal or 80))
    columns = ["requests\n/s", "TTFA\np50 ms", "\np99 ms", *(f"other {i}" for i in range(6)), "good\n/s"]
    rows = [[f"{row}000{i}" for i in range(len(columns))] for row in (1, 2)]
    print_numbers("of a test", columns, rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= (terminal or 120)
    if terminal == 80:
        names = ["requests/s", "TTFA p50 ms", "TTFA p99 ms", *columns[3:-1], "good/s"]
        wholes = [[name, *values] for name, *values in zip(names, *rows, strict=True)]
    else:
        wholes = rows
    shown = [[part.strip() for part in re.split("[│┃]", line)[1:-1]] for line in lines]
    assert all(whole in shown for whole in wholes), lines


BAD = [
    (["sing"], "No such command 'sing'"),
    (["serve", "/no/such"], "'/no/such' is not a directory; a model is a directory, or a repository"),
    (["serve", "name=/no/such"], "'/no/such' is not a directory"),
    (["serve", "=."], "MODEL or NAME=MODEL"),
    (["serve", "a=.", "a=tests"], "two models have the name 'a'; rename one with NAME=MODEL"),
    (["serve", "tests", "./tests"], "two models have the name 'tests'"),
    (["serve", "a=.", "b=/no/such"], "'/no/such' is not a directory"),
    (["serve", ".", "--port", "65536"], "--port"),
    (["serve", ".", "--port", "http"], "--port"),
    (
        ["serve", ".", "--policy", "fast"],
        "Invalid value for '--policy': 'fast' is not one of 'streaming', 'throughput'",
    ),
    (["serve", ".", "--dtype", "int4"], "'float32', 'bfloat16'"),
    (["serve", "a=.", "--alias", "tts-1"], "--alias 'tts-1' is not of the form NAME=MODEL"),
    (["serve", "a=.", "--alias", "=a"], "not of the form NAME=MODEL"),
    (["serve", "a=.", "--alias", "tts-1=b"], "model 'b' is not served; possible models: a"),
    (["serve", "a=.", "--alias", "a=a"], "--alias 'a' is already the id of a model"),
    (
        ["serve", "a=.", "b=tests", "--alias", "c=a", "--alias", "c=b"],
        "'c' is given twice: for 'a' and for 'b'",
    ),
    (["serve", "a=.", "--alias-voice", "alloy"], "--alias-voice 'alloy' is not of the form NAME=VOICE"),
    (["serve", ".", "--max-sessions", "-1"], "--max-sessions"),
    (["serve", ".", "--max-text-idle", "0"], "--max-text-idle"),
    (["serve", ".", "--max-slots", "0"], "--max-slots"),
    (["serve", ".", "--kv-memory", "4GB"], "4GiB, 512MiB"),
    (["serve", ".", "--kv-memory", "0"], "4GiB, 512MiB"),
    (["serve", ".", "--kv-memory", "9" * 400], "4GiB, 512MiB"),
    (["serve", ".", "--kv-memory", "9999999999GiB"], "4GiB, 512MiB"),
    (["serve", ".", "--max-slots", "1000000"], "--max-slots"),
    (["serve", ".", "--grace-s", "-1"], "--grace-s"),
    (["serve", ".", "--api-key", "a b"], "printable ASCII"),
    (["serve", ".", "--api-key", ""], "printable ASCII"),
    (
        ["serve", ".", "--host", "no.such.host.invalid", "--port", "0"],
        "cannot listen on no.such.host.invalid",
    ),
    (["serve", ".", "--sing"], "(see zoo serve --help)"),
    (["cache", "prune", "--sing"], "--sing (see zoo cache prune --help)"),
    (["serve", ".", "--private-metrics"], "--private-metrics requires an API key; set one with --api-key"),
    (["serve", ".", "--log", "xml"], "'json', 'text'"),
    (["say", "Hello.", "-m", "/no/such"], "'/no/such' is not a directory"),
    (
        ["say", "Hello.", "-m", ".", "-o", "out.wma"],
        "must end in one of: .wav, .mp3, .opus, .ogg, .webm, .aac, .m4a, .flac, .pcm",
    ),
    (
        ["say", "Hello.", "-m", ".", "--reference", "/no/such.wav"],
        "/no/such.wav cannot be read: No such file",
    ),
    (
        ["say", "Hello.", "-m", ".", "--reference", "README.md"],
        "README.md cannot be used: its audio format is not supported; use WAV",
    ),
    (["serve", ".", "--max-reference-bytes", "ten"], "4GiB, 512MiB"),
    (["serve", ".", "--max-reference-s", "61"], "--max-reference-s"),
    (["serve", ".", "--max-voices", "-1"], "--max-voices"),
    (["serve", "--keep-alive", "1m"], "--keep-alive, --load-wait and --model-memory need --model-dir"),
    (["serve", "--keep-alive", "5m"], "--keep-alive, --load-wait and --model-memory need --model-dir"),
    (["serve", "--load-wait", "300"], "--keep-alive, --load-wait and --model-memory need --model-dir"),
    (
        ["serve", "--max-works", "5"],
        "--max-works, --max-document-bytes and --max-works-bytes need --works-dir",
    ),
    (["serve", "--cache-dir", ""], "'--cache-dir': it is empty; give the path of a directory"),
    (["serve", "--works-dir", ""], "'--works-dir': it is empty"),
    (["voices", "list", "--voices-dir", ""], "'--voices-dir' (env var: 'ZOO_VOICES_DIR'): it is empty"),
    (
        ["serve", "--works-dir", "README.md"],
        "--works-dir: README.md is not a writable directory: File exists",
    ),
    (
        ["serve", "--voices-dir", "README.md"],
        "--voices-dir: README.md is not a writable directory: File exists",
    ),
    (["serve", "--model-dir", "/no/such"], "--model-dir"),
    (["serve", ".", "--model-dir", "zoo"], "--model-dir serves the models in zoo; leave out ."),
    (["serve", "--model-dir", "zoo", "--replicas", "2"], "leave out --replicas"),
    (["serve", "--model-dir", "zoo", "--device-map", "auto"], "--device-map is for one model"),
    (["serve", "--model-dir", "zoo", "--keep-alive", "soon"], "'soon' is not a duration; use 30s, 5m, 1h30m"),
    (["serve", "--model-dir", "zoo", "--load-wait", "0"], "--load-wait"),
    (["serve", "--model-dir", "zoo", "--model-memory", "much"], "'much' is not an amount of memory"),
    (["serve", "--model-dir", "zoo", "--alias", "a=b"], "model 'b' is not served"),
    (["say", "Hello.", "-m", ".", "-o", "/no/such/out.wav"], "cannot be written"),
    (["say", " ", "-m", "."], "no text"),
    (["say", "-", "-m", "."], "no text"),
    (["say", "\0\u200b\ufeff", "-m", "."], "no text"),
    (["say", "a\udcff", "-m", "."], "the text is not in UTF-8"),
    (["say", "Hello.", "-m", ".", "--temperature", "9"], "--temperature"),
    (["say", "Hello.", "-m", ".", "--seed", "-1"], "--seed"),
    (["batch", "/no/such.jsonl", "/tmp/x", "-m", "."], "/no/such.jsonl cannot be read"),
    (["batch", "README.md"], "Missing argument 'OUT_DIR'"),
    (["batch", "README.md", "/tmp/x", "-m", ".", "--format", "wma"], "'wav', 'mp3'"),
    (["load", "http://x"], "give either --rate (an open loop) or --streams (a closed loop)"),
    (["load", "http://x", "--rate", "1", "--streams", "1"], "either --rate"),
    (["load", "x:1", "--rate", "1"], "'x:1' is not the address of a server; use http://HOST:PORT"),
    (["load", "http://x", "--rate", "0"], "--rate"),
    (["load", "http://x", "--rate", "inf"], "--rate and --duration must be finite"),
    (["load", "http://x", "--streams", "1", "--duration", "inf"], "--rate and --duration must be finite"),
    (["load", "http://x", "--rate", "1", "--format", "flac"], "not possible; use pcm, wav, mp3, opus, aac"),
    (["load", "http://x", "--rate", "1", "--texts", "/no/such"], "neither short, long, mixed nor a file"),
    (["load", "http://x", "--rate", "1", "-O", "seed"], "NAME=VALUE"),
    (
        ["load", "http://x", "--rate", "1", "--cancels", "0.6", "--slow-readers", "0.6"],
        "at most 1 is possible",
    ),
    (["load", "http://x", "--rate", "1", "--plot", "a.gif"], ".png, .svg, .pdf"),
    (["load", "http://x", "--rate", "1", "--reference", "/no/such.wav"], "/no/such.wav cannot be read"),
    (["load", "http://127.0.0.1:9", "--rate", "1"], "there is no server at http://127.0.0.1:9/v1"),
    (["inspect", "/no/such"], "'/no/such' is not a directory"),
    (["inspect", "tests"], "is not a model"),
    (["inspect", "tests", "--device", "gpu"], "device 'gpu' is not possible"),
    (["demo-checkpoint", "gpt", "/tmp/x"], "there is no family 'gpt'; possible families: "),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_a_bad_argument_is_one_line_that_says_what_is_possible(zoo, arguments, says):
    assert says in refused(zoo(*arguments))


@pytest.mark.slow
def test_a_demo_checkpoint_that_cannot_be_written(zoo, tmp_path, checkpoint):
    assert "tiny" in refused(zoo("demo-checkpoint", "qwen3_tts", tmp_path / "x", "--size", "huge"))
    assert str(checkpoint) in refused(zoo("demo-checkpoint", "qwen3_tts", checkpoint))
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refused(zoo("demo-checkpoint", "qwen3_tts", tmp_path / "file"))
    assert "cannot be written" in refused(zoo("demo-checkpoint", "qwen3_tts", tmp_path / "file" / "below"))


def test_a_file_that_the_system_refuses_is_one_line(zoo, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", str(tmp_path / "dir"))

    monkeypatch.setattr("serving.http.voices.Voices.survey", full)
    done = zoo("voices", "list", "--voices-dir", tmp_path)
    assert (done.returncode, done.stderr) == (1, f"zoo: {tmp_path}/dir: No space left on device\n")


def test_a_process_refuses_with_one_line():
    assert "no such" in refused(process("inspect", "/no such"))


def test_a_port_in_use_is_refused_before_the_model_is_loaded(zoo):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in refused(
            zoo("serve", ".", "--port", port)
        )


@pytest.mark.slow
def test_a_directory_that_is_not_a_model_ends_the_server(tmp_path):
    done = process("serve", tmp_path, "--port", 0)
    line = f"zoo: {tmp_path} is not a model: it has no config.json"
    assert done.returncode == 2 and any(said.startswith(line) for said in done.stderr.splitlines())


@pytest.mark.slow
def test_a_bad_directory_among_good_ones_ends_the_server_with_its_name(checkpoint, tmp_path):
    done = process("serve", f"good={checkpoint}", f"bad={tmp_path}", "--port", 0)
    line = f"zoo: model 'bad': {tmp_path} is not a model: it has no config.json"
    assert done.returncode == 2 and any(said.startswith(line) for said in done.stderr.splitlines())


@pytest.mark.slow
def test_a_device_that_does_not_exist_ends_the_server(checkpoint):
    done = process("serve", checkpoint, "--port", 0, "--device", "nowhere")
    assert done.returncode == 2 and any(
        line.startswith("zoo: device 'nowhere'") for line in done.stderr.splitlines()
    )


def test_inspect(zoo, checkpoint):
    done = zoo("inspect", checkpoint, "--json")
    facts = json.loads(done.stdout)
    assert (facts["family"], facts["sample_rate_hz"]) == ("qwen3_tts", 24000) and "vivian" in facts["voices"]
    on_cpu = json.loads(zoo("inspect", checkpoint, "--json", "--device", "cpu").stdout)
    assert on_cpu["memory"]["dtype"] == "float32"  # as `zoo serve` takes it there
    table = zoo("inspect", checkpoint).stdout
    assert "qwen3_tts" in table and "vivian" in table and f"{facts['parameters']:,}" in table
    for name, option in facts["options"].items():
        [row] = [line for line in table.splitlines() if line.split()[1:2] == [name]]
        assert option["possible"] in row and option["help"] in row


def test_say_speaks_into_a_file(zoo, checkpoint, tmp_path):
    out = tmp_path / "out.wav"
    fields = ["-m", checkpoint, "-o", out, "--voice", "vivian", "--temperature", 0, "--max-new-tokens", 12]
    done = zoo("say", "Hello.", *fields)
    assert done.returncode == 0, done.stderr
    with wave.open(str(out)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24000)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    frames = int(done.stdout.split(": ")[1].split()[0])
    assert 0 < frames <= 12 and len(samples) == 1920 * frames and samples.any()
    assert f"{frames * 0.08:.2f} s of audio" in done.stdout and "RTF" in done.stdout
    again = tmp_path / "again.wav"
    fields[3] = again
    assert zoo("say", "-", *fields, stdin="Hello.").returncode == 0
    assert again.read_bytes() == out.read_bytes()


def test_say_reports_the_errors_of_the_model(zoo, checkpoint, tmp_path):
    def fault(*more):
        return refused(zoo("say", "Hello.", "-m", checkpoint, "-o", tmp_path / "out.wav", *more))

    assert "alloy" in (line := fault("--voice", "alloy")) and "vivian" in line
    line = fault("-O", "cfg_scale=2")
    assert line == (
        "zoo: qwen3_tts has no option 'cfg_scale'; possible: "
        "depth_temperature, depth_top_k, depth_top_p, text_mode\n"
    )
    assert "text_mode is 'diagonal'; possible: full, interleaved" in fault("-O", "text_mode=diagonal")
    assert "depth_top_k is 'x'; possible: an integer from 0" in fault("--option", "depth_top_k=x")
    assert "must be NAME=VALUE" in fault("-O", "text_mode")
    assert "temperature has its own flag: --temperature 0.5" in fault("-O", "temperature=0.5")
    assert not (tmp_path / "out.wav").exists()


def test_say_takes_options(zoo, checkpoint, tmp_path):
    def say(*more):
        out = tmp_path / "out.wav"
        fields = ["-m", checkpoint, "-o", out, "--voice", "vivian", "--max-new-tokens", 6]
        done = zoo("say", "Hello.", *fields, *more)
        assert done.returncode == 0, done.stderr
        return out.read_bytes()

    usual = say()
    assert say("-O", "text_mode=full") == usual != say("-O", "text_mode=interleaved")
    assert say("-O", "depth_temperature=0", "-O", "depth_top_k=1") != usual


@pytest.mark.slow
def test_say_speaks_at_the_given_speed(zoo, checkpoint, tmp_path):
    def say(*more):
        out = tmp_path / "out.wav"
        fields = ["-m", checkpoint, "-o", out, "--voice", "vivian", "--max-new-tokens", 6, *more]
        assert zoo("say", "Hello.", *fields).returncode == 0
        return out.read_bytes()

    assert say("--speed", 1) == say()
    assert len(say("--speed", 2)) - 44 == (len(say()) - 44) // 2
    assert "--speed" in refused(zoo("say", "Hello.", "-m", checkpoint, "--speed", 5))


def test_say_speaks_at_the_given_loudness(zoo, checkpoint, tmp_path):
    out = tmp_path / "out.pcm"
    fields = ["-m", checkpoint, "-o", out, "--voice", "vivian", "--max-new-tokens", 8]
    assert zoo("say", "Hello.", *fields, "--loudness", -20).returncode == 0
    assert loudness_of(out.read_bytes(), 24000) == pytest.approx(-20, abs=0.2)
    assert "--loudness" in refused(zoo("say", "Hello.", "-m", checkpoint, "--loudness", 0))


@pytest.mark.slow
def test_say_normalizes_and_splits_texts_if_asked(zoo, checkpoint, tmp_path):
    def say(text, *more):
        out = tmp_path / "out.wav"
        done = zoo(
            "say", text, "-m", checkpoint, "-o", out, "--voice", "vivian", "--max-new-tokens", 6, *more
        )
        assert done.returncode == 0, done.stderr
        return out.read_bytes()

    # The number comes first, because a few frames only reach the beginning of the text.
    assert say("3 of it.", "--normalize") == say("three of it.") != say("3 of it.")
    assert say("It hums and hums. " * 60) != say("It hums and hums. " * 60, "--no-split-text")


def test_say_replaces_terms(zoo, checkpoint, tmp_path):
    def say(text, *more):
        out = tmp_path / "out.wav"
        done = zoo(
            "say", text, "-m", checkpoint, "-o", out, "--voice", "vivian", "--max-new-tokens", 6, *more
        )
        assert done.returncode == 0, done.stderr
        return out.read_bytes()

    words = tmp_path / "words.json"
    words.write_text('[{"term": "nginx", "say": "engine x", "voice": "vivian"}]')
    assert say("Nginx.", "--pronunciations", words) == say("engine x.")
    words.write_text("{}")
    out = refused(zoo("say", "Hello.", "-m", checkpoint, "--pronunciations", words))
    assert "must be a JSON list such as" in out


def test_say_speaks_with_one_thread_if_the_model_is_small(zoo, checkpoint, tmp_path, monkeypatch):
    """On a busy machine, a second thread made the small voice take thirty times as long."""
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    how = "-m", checkpoint, "-o", tmp_path / "out.wav", "--max-new-tokens", 2, "--voice", "vivian"
    assert zoo("say", "Hello.", *how).returncode == 0 and threads == [1]


def test_say_rounds_weights_only_if_asked(zoo, checkpoint, tmp_path, monkeypatch):
    prepared = []

    def prepare_for_host(family, weights):  # the real one compiles kernels
        prepared.append(weights)

    monkeypatch.setattr("serving.engine.device.prepare_for_host.prepare_for_host", prepare_for_host)
    how = "Hello.", "-m", checkpoint, "-o", tmp_path / "out.wav", "--max-new-tokens", 2, "--voice", "vivian"
    assert zoo("say", *how).returncode == 0 and prepared == []
    assert zoo("say", *how, "--weights", "int8").returncode == 0 and prepared == ["int8"]


def test_say_writes_no_file_without_audio(zoo, checkpoint, tmp_path, monkeypatch):
    def generate(family, request):
        return Speech(torch.zeros(0, 16), torch.zeros(0), 24000)

    monkeypatch.setattr("zoo.loop.generate", generate)
    done = zoo("say", "Hello.", "-m", checkpoint, "-o", tmp_path / "out.wav", "--voice", "vivian")
    assert (done.returncode, done.stdout) == (1, "") and not (tmp_path / "out.wav").exists()
    assert done.stderr == f"zoo: {NO_AUDIO}\n"


def test_a_full_disk_leaves_the_file_that_was_there(zoo, checkpoint, tmp_path, monkeypatch):
    def full(path, data):
        path.open("wb").write(data[:9])
        raise OSError(28, "No space left on device")

    (out := tmp_path / "out.wav").write_text("before")
    say = ("say", "Hello.", "-m", checkpoint, "-o", out, "--voice", "vivian", "--max-new-tokens", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        done = zoo(*say)
    assert (done.returncode, done.stderr) == (1, f"zoo: {out} cannot be written: No space left on device\n")
    monkeypatch.setattr("compile_cache.store.export", lambda root, file: full(file, b"entries"))
    done = zoo("cache", "export", out)
    assert done.stderr == f"zoo: {out} cannot be written: No space left on device\n"
    assert out.read_text() == "before" and list(tmp_path.iterdir()) == [out]


def test_say_writes_through_a_link_and_into_a_pipe(zoo, checkpoint, tmp_path):
    say = ("say", "Hello.", "-m", checkpoint, "--voice", "vivian", "--max-new-tokens", 1, "-o")
    (link := tmp_path / "link.pcm").symlink_to(tmp_path / "there.pcm")
    assert zoo(*say, link).returncode == 0 and link.is_symlink()
    os.mkfifo(pipe := tmp_path / "pipe.pcm")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert zoo(*say, pipe).returncode == 0 and os.read(reader, 1 << 16) == link.read_bytes()
    os.close(reader)


@pytest.mark.parametrize("suffix", [".mp3", ".opus", ".ogg", ".aac", ".flac", ".pcm", ".WAV"])
def test_say_writes_every_format(zoo, checkpoint, tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    done = zoo(
        "say",
        "Hello.",
        "-m",
        checkpoint,
        "-o",
        out,
        "--voice",
        "vivian",
        "--temperature",
        0,
        "--max-new-tokens",
        3,
    )
    assert done.returncode == 0, done.stderr
    frames = int(done.stdout.split(": ")[1].split()[0])
    if suffix == ".pcm":
        assert len(out.read_bytes()) == 2 * 1920 * frames
    else:
        assert 0 <= decode(out.read_bytes(), 60).duration_s - 0.08 * frames < 0.1


def test_say_in_the_voice_of_a_recording(zoo, tmp_path):
    assert zoo("demo-checkpoint", "qwen3_tts", tmp_path / "base", "--size", "tiny-base").returncode == 0
    sample = tmp_path / "sample.flac"
    soundfile.write(sample, np.random.default_rng(0).uniform(-0.3, 0.3, (16000, 2)), 16000)

    def say(*more):
        out = tmp_path / "out.wav"
        fields = ["-m", tmp_path / "base", "-o", out, "--temperature", 0, "--max-new-tokens", 3]
        done = zoo("say", "Hello.", *fields, *more)
        return done if done.returncode else out.read_bytes()

    with_text = say("--reference", sample, "--reference-text", "Hi.")
    sound = say("--reference", sample, "-O", "x_vector_only_mode=true")
    assert len(with_text) > 44 and len(sound) > 44 and with_text != sound
    assert "zoo: --reference: a reference is needed" in refused(say())
    assert "zoo: --reference-text: transcript is missing" in refused(say("--reference", sample))


@pytest.mark.slow
def test_bench_measures_a_model(checkpoint):
    done = process(
        "bench",
        checkpoint,
        "--streams",
        1,
        "--streams",
        2,
        "--frames",
        5,
        "--rounds",
        1,
        "--no-compile",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [run["streams"] for run in result["runs"]] == [1, 2]
    assert all(
        run["frames"] == 5 * run["streams"] and run["rtf"] > 0 and run["audio_s"] == run["frames"] * 0.08
        for run in result["runs"]
    )
    assert 0 < result["step_weight_bytes"] < 10_000_000 and result["frame_flops"] > 1_000_000


def test_bench_refuses_an_unknown_comparison(checkpoint):
    assert "use --against reference" in refused(process("bench", checkpoint, "--against", "nobody"))


def test_an_empty_key_in_the_environment_is_refused(monkeypatch):
    """A user who sets the variable wants protection, so the server must not start without a key."""
    monkeypatch.setenv("ZOO_API_KEY", "")
    done = shell.zoo("serve", ".")
    assert done.returncode == 2 and done.stderr.startswith("zoo: ZOO_API_KEY is empty")


def test_an_error_of_a_file_without_a_number_is_told_too(zoo, monkeypatch, tmp_path):
    def shrink(root, file):
        raise OSError("unexpected end of data")  # tarfile's, for a file that becomes shorter

    monkeypatch.setattr("compile_cache.store.export", shrink)
    done = zoo("cache", "export", tmp_path / "cache.tar")
    assert done.returncode == 2 and done.stderr.endswith("cannot be written: unexpected end of data\n")
