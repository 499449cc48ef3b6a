"""The programs of other servers that run against `zoo serve`, and what each needs.

A word in braces is filled in: {url}, {ws}, {host}, {port}, {code} (the checkout), {work} (an empty folder of the case),
{recording}, {recordings} (a list of them), {text} and {embedding} (files), {url_of_recording}.
"""

from __future__ import annotations

from dataclasses import dataclass

QWEN = "examples/online_serving/text_to_speech/qwen3_tts"
SMALL = "small"  # the server of the small voice
NOISE = "noise"  # the server of demo checkpoints under the published names
CUSTOM, BASE, DESIGN = (f"Qwen/Qwen3-TTS-12Hz-1.7B-{kind}" for kind in ("CustomVoice", "Base", "VoiceDesign"))
TEXT = "Hello there. How are you today?"
SHORT = ("--max-new-tokens", "24")  # random weights seldom end by themselves
CLONE = ("--ref-audio", "{recording}", "--ref-text", "The words of the recording.")
ERRORS = ("Error", "ERROR", "FAILED", "Traceback")  # beginnings of a line that tells of one


@dataclass(frozen=True)
class Case:
    """One run of a program.

    audio: the file or folder that must hold audio afterwards. wanted: what the program must print. because: why it is
    known to fail.
    """

    name: str
    argv: tuple[str, ...]
    server: str = SMALL
    audio: str | None = None
    wanted: str = ""
    because: str | None = None


@dataclass(frozen=True)
class Suite:
    """The programs of one project. variable: names the checkout. packages: of its environment."""

    name: str
    variable: str
    licence: str
    packages: tuple[str, ...]
    cases: tuple[Case, ...]


def speech(name: str, *more: str, server: str = NOISE, because: str | None = None) -> Case:
    program = f"{{code}}/{QWEN}/openai_speech_client.py"
    argv = (program, "--api-base", "{url}", "--text", TEXT, "--output", "{work}/a.audio", *more, *SHORT)
    return Case(f"openai_speech_client: {name}", argv, server, "a.audio", because=because)


def socket(name: str, *more: str, model: str = CUSTOM) -> Case:
    program = f"{{code}}/{QWEN}/streaming_speech_client.py"
    argv = (
        program,
        "--url",
        "{ws}",
        "--text",
        TEXT,
        "--output-dir",
        "{work}",
        "--model",
        model,
        *more,
        *SHORT,
    )
    return Case(f"streaming_speech_client: {name}", argv, NOISE, ".", "Session complete: 1 sentence(s)")


def fish(name: str, *more: str) -> Case:
    program = "{code}/examples/online_serving/text_to_speech/fish_speech/speech_client.py"
    argv = (program, "--api-base", "{url}", "--text", "Hi.", "--output", "{work}/a.audio", *more)
    return Case(f"fish_speech/speech_client: {name}", argv, NOISE, "a.audio")


FORMATS = ("wav", "mp3", "flac", "pcm", "aac", "opus")
EMBEDDING = "a speaker embedding is no recording, and requests take recordings only"
BATCH = "it reads results[].audio_data; our answer is data[].audio, and holding both would double its size"

VLLM_OMNI = Suite(
    "vLLM-Omni",
    "ZOO_VLLM_OMNI",
    "Apache-2.0",
    ("httpx", "websockets", "aiohttp", "numpy", "tqdm"),
    (
        *(speech(form, "--response-format", form) for form in FORMATS),
        speech("a voice", "--speaker", "ryan"),
        speech("a language", "--language", "English"),
        speech("instructions", "--instructions", "Speak with excitement"),
        speech("CustomVoice", "--task-type", "CustomVoice"),
        speech(
            "VoiceDesign",
            *(
                "--task-type",
                "VoiceDesign",
                "--model",
                DESIGN,
                "--instructions",
                "A warm, friendly female voice",
            ),
        ),
        speech("Base", "--task-type", "Base", "--model", BASE, *CLONE),
        speech(
            "Base, the voice alone", "--task-type", "Base", "--model", BASE, *CLONE[:2], "--x-vector-only"
        ),
        speech("the small voice", "--model", "small_voice", server=SMALL),
        speech(
            "an embedding",
            *("--task-type", "Base", "--model", BASE, "--speaker-embedding", "{embedding}"),
            because=EMBEDDING,
        ),
        *(socket(form, "--response-format", form) for form in FORMATS),
        socket("word by word", "--simulate-stt", "--stt-delay", "0.01"),
        socket("audio in pieces", "--stream-audio", "--response-format", "pcm"),
        socket("a voice", "--speaker", "Ryan"),
        socket("a language", "--language", "Chinese"),
        socket("a speed", "--speed", "1.5"),
        socket("instructions", "--instructions", "Whisper"),
        socket(
            "Base",
            "--task-type",
            "Base",
            "--ref-text",
            "Words.",
            "--ref-audio",
            "{url_of_recording}",
            model=BASE,
        ),
        socket(
            "VoiceDesign", "--task-type", "VoiceDesign", "--instructions", "A cheerful voice", model=DESIGN
        ),
        Case(
            "batch_speech_client",
            (
                f"{{code}}/{QWEN}/batch_speech_client.py",
                "--api-base",
                "{url}",
                "--output-dir",
                "{work}",
                "--texts",
                "One.",
            ),
            SMALL,
            ".",
            because=BATCH,
        ),
        *(fish(name, *more) for name, more in (("plain", ()), ("clone", CLONE), ("stream", ("--stream",)))),
        *(fish(form, "--response-format", form) for form in FORMATS),
        *(
            Case(
                f"voxcpm2/openai_speech_client: {name}",
                (
                    "{code}/examples/online_serving/text_to_speech/voxcpm2/openai_speech_client.py",
                    *("--api-base", "{url}", "--text", "Hi.", "--output", "{work}/a.wav", *more),
                ),
                NOISE,
                "a.wav",
            )
            for name, more in (("plain", ()), ("clone", ("--ref-audio", "{recording}")))
        ),
        Case(
            "fish-speech/bench_speaker_cache",
            (
                "{code}/benchmarks/fish-speech/bench_speaker_cache.py",
                *(
                    "--host",
                    "{host}",
                    "--port",
                    "{port}",
                    "--ref-audio",
                    "{recording}",
                    "--ref-text",
                    "The words.",
                ),
                *("--num-prompts", "2", "--num-warmups", "1"),
            ),
            "clone",
            wanted="Upload response (200)",
        ),
    ),
)


def sglang(name: str, *more: str, server: str = "clone", because: str | None = None) -> Case:
    argv = (
        "{code}/benchmarks/eval/benchmark_tts_speed.py",
        *("--base-url", "{url}", "--testset", "{recordings}", "--max-samples", "2", "--disable-tqdm"),
        *(
            "--model",
            CUSTOM if server == NOISE else BASE,
            "--output-dir",
            "{work}",
            *SHORT,
            "--save-audio",
            *more,
        ),
    )
    return Case(
        f"benchmark_tts_speed: {name}", argv, server, "audio", "Failed requests:               0", because
    )


SGLANG_OMNI = Suite(
    "SGLang-Omni",
    "ZOO_SGLANG_OMNI",
    "MIT",
    ("aiohttp", "numpy", "requests", "tqdm"),
    (
        sglang("clone"),
        sglang("clone, two at once", "--concurrency", "2"),
        sglang("clone, sampling", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "30"),
        sglang("clone, a rate of requests", "--request-rate", "2"),
        sglang("clone, a penalty", "--repetition-penalty", "1.1"),
        sglang("plain", "--no-ref-audio", server=NOISE),
        sglang("plain, two at once", "--no-ref-audio", "--concurrency", "2", server=NOISE),
        sglang("plain, warm-up", "--no-ref-audio", "--warmup", "2", server=NOISE),
    ),
)

VOX_SERVE = Suite(
    "VoxServe",
    "ZOO_VOX_SERVE",
    "Apache-2.0",
    ("aiohttp", "numpy", "requests", "datasets"),
    (
        Case(
            "goodput",
            (
                "{code}/benchmark/goodput.py",
                "--host",
                "{host}",
                "--port",
                "{port}",
                "--rate",
                "1",
                "--duration",
                "3",
            ),
            wanted="| Failed | 0 |",
        ),
        Case(
            "throughput",
            ("{code}/benchmark/throughput.py", "--host", "{host}", "--port", "{port}", "--num-requests", "4"),
            wanted="Failed requests: 0",
        ),
        Case(
            "audiobook",
            (
                "{code}/examples/audiobook/audiobook.py",
                "{text}",
                "--url",
                "{url}",
                "-o",
                "{work}/a.wav",
                "--concurrency",
                "4",
            ),
            audio="a.wav",
        ),
        Case(
            "input_streaming",
            (
                "{code}/examples/input_streaming/input_streaming.py",
                *("--url", "{url}", "--text", TEXT, "--delay", "0.01", "--output", "{work}/a.wav"),
            ),
            audio="a.wav",
        ),
        Case(
            "input_streaming: a voice",
            (
                "{code}/examples/input_streaming/input_streaming.py",
                *(
                    "--url",
                    "{url}",
                    "--text",
                    TEXT,
                    "--delay",
                    "0.01",
                    "--speaker",
                    "slt",
                    "--output",
                    "{work}/a.wav",
                ),
            ),
            audio="a.wav",
        ),
    ),
)

SUITES = (VLLM_OMNI, SGLANG_OMNI, VOX_SERVE)


@dataclass(frozen=True)
class TestSuite:
    """Tests of a project that run with pytest. files: of the checkout, copied into a folder of their own. conftest: ours,
    in place of fixtures that need the project's server in the same process. known: failures, and why."""

    name: str
    variable: str
    licence: str
    packages: tuple[str, ...]
    files: tuple[str, ...]
    conftest: str | None
    environ: tuple[tuple[str, str], ...]
    known: tuple[tuple[str, str], ...] = ()
    server: str = SMALL


KOKORO = TestSuite(
    "Kokoro-FastAPI",
    "ZOO_KOKORO_FASTAPI",
    "Apache-2.0",
    ("pytest", "httpx", "openai"),
    tuple(
        f"api/tests/integration/{name}.py"
        for name in ("conftest", "test_rate_durations", "test_voices_endpoint")
    ),
    None,
    (("KOKORO_BASE_URL", "{url}"),),
)
SPEACHES = TestSuite(
    "speaches",
    "ZOO_SPEACHES",
    "MIT",
    ("pytest", "pytest-asyncio", "httpx", "openai", "pydub", "soundfile", "pydantic", "imageio-ffmpeg"),
    ("tests/speech_test.py",),
    "speaches_fixtures.py",
    (("ZOO_URL", "{url}"), ("ZOO_CODE", "{code}")),
)
TEST_SUITES = (KOKORO, SPEACHES)
