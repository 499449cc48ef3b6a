"""Speech on the page at GET / in a headless Chromium, with a fake engine (fake_engine.py)."""

import asyncio
import io
import os
import random
import subprocess
import sys
import wave
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fake_engine import CLONER, MODEL, RATE_HZ, READY, TONE_SAMPLES, frame, tone
from http_server import Server, until
from uploads import recording

from serving import protocol

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[browser]'")

pytestmark = [pytest.mark.browser, pytest.mark.slow]
KEY = "sk-test"
IS_OVER = "playground.take !== null && !playground.isSpeaking"
TEXT = 'it\'s "$HOME" `a` \\n ${b} %s größer\n 語 😀 </script>'
NASTY = "<img src=x onerror=alert(1)>"
STRANGE = msgspec.structs.replace(
    MODEL,
    id=NASTY,
    voices=[NASTY, "b"],
    languages=[NASTY],
    licence=NASTY,
    options=[
        protocol.OptionInfo(f"{NASTY}{i}", "str", NASTY, NASTY, NASTY, None, choices)
        for i, choices in enumerate([(), (NASTY, "b")])
    ],
)
DESIGNER = msgspec.structs.replace(
    MODEL, id="designer", voices=[], languages=[], modes=["design"], options=[]
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, CLONER, DESIGNER]) as server:
        yield server


@pytest.fixture
def page(visit, server):
    return visit(server)


def speak(page, text):
    page.fill("#input", text)
    page.click("#speak")


def wait(page, fact):
    """Wait for a condition. Playwright's own function evaluates strings in the page, which its policy
    forbids."""
    until(lambda: page.evaluate(fact), 10)


def player_of(page):
    """Return the player's records."""
    return page.evaluate(
        "(({ length, runs, schedule, leadS }) => ({ length, runs, schedule, leadS }))(playground.take.player)"
    )


def shown(page, id):
    return page.text_content(f"#{id}")


def asked_last(server):
    return list(server.engine.asked.values())[-1]


def test_the_page_loads(page, server):
    assert page.title() == "speechzoo" and shown(page, "speak") == "Speak"
    assert page.input_value("#model") == "fake" and page.input_value("#voice") == "vivian"
    assert "24 kHz" in shown(page, "model-hint") and "research only" in shown(page, "model-hint")


def test_a_model_on_demand_shows_how_far_it_is_loaded(visit, tmp_path):
    def tell(stage):
        state = protocol.ModelState(stage, float(stage == "loaded"))
        server.call(server.engine.tell, protocol.ModelStates({"fake": state}))
        until(lambda: server.app.state.server.engine.states == {"fake": state})

    with Server(tmp_path) as server:
        tell("cold")
        page = visit(server)
        wait(page, "playground.isReady")
        assert "not loaded: the next request loads it" in shown(page, "model-hint")
        assert page.is_hidden("#waiting")
        server.call(server.engine.go.clear)
        speak(page, "cold 3")
        page.wait_for_selector("#waiting", state="visible")
        assert shown(page, "waiting-state") == "Loading the model"
        tell("loaded")
        server.call(server.engine.go.set)
        wait(page, "playground.take.length > 0 && !playground.take.isComing")
        assert page.is_hidden("#waiting")
        until(lambda: "not loaded" not in shown(page, "model-hint"), 10)


def test_speech_plays_and_can_be_downloaded(page, server, tmp_path):
    speak(page, "tone 25")
    wait(page, IS_OVER)
    assert page.evaluate("playground.take.player.context.sampleRate") == RATE_HZ
    assert (
        shown(page, "length") == "2.0 s"
        and shown(page, "ttfa").endswith(" ms")
        and float(shown(page, "rtf")) > 0
    )
    check_schedule(player_of(page), 25 * TONE_SAMPLES)
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == f"fake-{asked_last(server)['seed']}.wav"
    with wave.open(str(download.value.path())) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE_HZ)
        assert file.readframes(RATE_HZ * 60) == b"".join(map(tone, range(25)))


def check_schedule(player, num_samples):
    """Check that every chunk begins exactly where the one before it ends. A chunk that arrived too late
    begins a run, which is recorded."""
    assert player["length"] == num_samples == sum(chunk["length"] for chunk in player["schedule"])
    begins = {run["from"]: run["frame"] for run in player["runs"]}
    at, frame = 0, None
    for chunk in player["schedule"]:
        frame = begins.get(at, frame)
        assert chunk["frame"] == frame and chunk["aheadS"] > 0
        at, frame = at + chunk["length"], frame + chunk["length"]


def test_speech_that_arrives_in_time_plays_without_a_gap(visit, server):
    """The audio clock stands still until everything has arrived, so that a slow machine makes nothing
    late."""
    page = visit(server)
    page.evaluate(
        """AudioContext.prototype.hear = AudioContext.prototype.resume;
        AudioContext.prototype.resume = AudioContext.prototype.suspend;
        null"""
    )
    page.click("#input")  # starts the audio output
    wait(page, "[...playground.contexts.values()].every((context) => context.state === 'suspended')")
    speak(page, "tone 25")
    wait(page, "playground.take?.isComing === false")
    assert page.evaluate("playground.isSpeaking") and shown(page, "speak") == "Stop"
    player = player_of(page)
    check_schedule(player, 25 * TONE_SAMPLES)
    assert len(player["runs"]) == 1 and shown(page, "underruns") == "0"
    page.evaluate("playground.take.context.hear()")
    wait(page, IS_OVER)
    assert page.evaluate("playground.take.positionS") == 2.0


def test_playback_equals_the_received_samples(page):
    """The browser's own mixer renders chunks of many sizes."""
    sizes = [random.Random(1).randrange(1, 3000) for _ in range(40)]
    heard = page.evaluate(
        """async (sizes) => {
            const { Player } = await import("./playground/player.js");
            const length = sizes.reduce((sum, size) => sum + size);
            const context = new OfflineAudioContext(1, length + 24000, 24000);
            const player = new Player(context, 24000);
            let at = 0;
            for (const size of sizes) player.push(Float32Array.from({ length: size }, () => Math.sin(at++)));
            const samples = (await context.startRendering()).getChannelData(0).slice(player.runs[0].frame);
            return [player.runs.length, at, ...samples.slice(0, at)];
        }""",
        sizes,
    )
    assert heard[:2] == [1, sum(sizes)]
    np.testing.assert_allclose(heard[2:], np.sin(np.arange(sum(sizes))), atol=1e-6)


def test_an_underrun_is_counted_and_increases_the_lead(page, server):
    server.call(server.engine.go.clear)
    speak(page, "frames 3")
    wait(page, "playground.take?.player?.positionS > 0.004")
    server.call(server.engine.go.set)
    wait(page, IS_OVER)
    player = player_of(page)
    check_schedule(player, 300)
    assert len(player["runs"]) == 2 and player["runs"][1]["from"] == 100
    assert shown(page, "underruns") == "1" and player["leadS"] == 0.12


@pytest.mark.parametrize(
    ("text", "num_samples"), [("hold 3", 300), ("queued", 0)], ids=["speaking", "waiting"]
)
@pytest.mark.parametrize("key", ["Escape", None], ids=["by key", "by button"])
def test_stop_cancels_the_request(page, server, text, num_samples, key):
    num_asked = len(server.engine.asked)
    speak(page, text)
    wait(page, f"playground.take.length === {num_samples}")
    until(lambda: len(server.engine.asked) == num_asked + 1)
    page.keyboard.press(key) if key else page.click("#speak")
    until(lambda: list(server.engine.asked)[-1] in server.engine.cancelled)
    assert shown(page, "speak") == "Speak" and page.evaluate(IS_OVER)
    assert page.is_visible("#download") == bool(num_samples) and shown(page, "problem") == ""


def test_leaving_the_page_cancels_the_request(page, server):
    speak(page, "hold 3")
    wait(page, "playground.take.length === 300")
    page.goto("about:blank")
    until(lambda: list(server.engine.asked)[-1] in server.engine.cancelled)


def test_a_new_request_cancels_the_current_one(page, server):
    speak(page, "hold 3")
    wait(page, "playground.take.length === 300")
    first = list(server.engine.asked)[-1]
    page.fill("#input", "frames 2")
    page.keyboard.press("Control+Enter")
    wait(page, f"playground.take.length === 200 && {IS_OVER}")
    until(lambda: first in server.engine.cancelled)


def test_play_again_repeats_the_speech(page):
    speak(page, "frames 50")
    wait(page, IS_OVER)
    page.click("#again")
    assert shown(page, "speak") == "Stop"
    wait(page, IS_OVER)
    assert page.evaluate("playground.take.replay.length") == 5000 and shown(page, "length") == "0.2 s"


@pytest.mark.parametrize("param", ["text", "voice", "language", "cfg_scale", "max_frames"])
def test_an_error_is_shown_next_to_its_field(page, param):
    name = {"text": "input", "max_frames": "max_new_tokens"}.get(param, param)
    speak(page, f"reject {param}")
    field = page.locator(f"[data-field={name}]")
    sync_api.expect(field.locator(".error")).to_have_text(f"{name} is not possible")
    control = field.locator("input:not([type=range]), select, textarea")
    sync_api.expect(control).to_be_focused()
    assert control.get_attribute("aria-invalid") == "true" and field.locator(".error").is_visible()
    assert field.locator(".error").get_attribute("id") in control.get_attribute("aria-describedby")
    speak(page, "frames 1")
    wait(page, IS_OVER)
    assert page.locator("[aria-invalid]").count() == 0 and field.locator(".error").text_content() == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full", "256 requests wait already"),
        ("reject turns", "turns is not possible"),
        ("silent", "the model ended before its first frame"),
        ("fail 0", "the codec broke"),
        ("fail 2", "the codec broke"),
    ],
)
def test_an_error_without_a_field_is_shown_as_text(page, text, message):
    speak(page, text)
    sync_api.expect(page.locator("#problem")).to_have_text(message)
    assert page.get_attribute("#problem", "role") == "alert" and shown(page, "speak") == "Speak"
    speak(page, "frames 1")
    wait(page, IS_OVER)
    assert shown(page, "problem") == ""


def test_invalid_values_are_sent_and_refused_by_the_server(page):
    page.click("summary")
    page.fill("#option-temperature", "warm")
    speak(page, "frames 1")
    sync_api.expect(page.locator("[data-field=temperature] .error")).to_contain_text(
        "temperature takes a number from 0"
    )


def test_the_models_options_are_shown_and_only_set_values_are_sent(page, server):
    names = "[...document.querySelectorAll('#options .field')].map((field) => field.dataset.field)"
    page.click("summary")
    assert page.evaluate(names) == [option.name for option in MODEL.options]
    assert page.get_attribute("#option-temperature", "placeholder") == "0.9"
    assert "how far sampling strays (a number from 0 to 2)" in page.text_content("[data-field=temperature]")
    page.fill("#option-temperature", "0.5")
    page.select_option("#option-text_mode", "interleaved")
    page.fill("#seed", "7")
    page.fill("#loudness", "-18")
    speak(page, "frames 1")
    wait(page, IS_OVER)
    assert '"loudness": -18' in shown(page, "code")
    page.fill("#loudness", "")
    speak(page, "frames 1")
    wait(page, IS_OVER)
    given = {
        "text": "frames 1",
        "voice": "vivian",
        "seed": 7,
        "temperature": 0.5,
        "options": {"text_mode": "interleaved"},
    }
    assert asked_last(server) == given

    page.select_option("#model", "cloner")
    assert page.evaluate(names) == ["x_vector_only_mode"] and page.is_visible("#recording")
    assert page.evaluate("document.querySelector('#voice').selectedOptions[0].text") == "from a recording"

    page.select_option("#model", "designer")
    assert (
        page.evaluate(names) == [] and not page.is_visible("#recording") and not page.is_visible("#language")
    )
    page.fill("#instructions", "A calm voice.")
    speak(page, "frames 1")
    wait(page, IS_OVER)
    assert asked_last(server) == {"text": "frames 1", "instructions": "A calm voice.", "seed": 7}


def test_a_number_with_a_range_and_a_default_has_a_slider(page, server):
    page.click("summary")
    assert page.locator("#options [type=range]").count() == 2  # not of solver_steps: the model decides
    slider = page.locator("[data-field=cfg_scale] [type=range]")
    assert [slider.get_attribute(name) for name in ("min", "max")] == ["0", "100"]
    assert slider.input_value() == "2" and page.input_value("#option-cfg_scale") == ""
    slider.fill("3.25")
    assert page.input_value("#option-cfg_scale") == "3.25"
    speak(page, "frames 1")
    wait(page, IS_OVER)
    assert asked_last(server)["options"] == {"cfg_scale": 3.25}
    page.fill("#option-cfg_scale", "40")
    assert slider.input_value() == "40"
    page.fill("#option-cfg_scale", "")
    assert slider.input_value() == "2"


def choose_recording(page, tmp_path, name="the speaker's.wav", **more):
    (tmp_path / name).write_bytes(recording(**more))
    page.select_option("#model", "cloner")
    page.set_input_files("#ref-file", tmp_path / name)
    page.wait_for_selector("#ref-heard:visible")


@pytest.mark.parametrize("language", ["curl", "python"])
@pytest.mark.parametrize("has_recording", [False, True])
def test_copied_code_makes_the_same_request(page, server, tmp_path, language, has_recording):
    if has_recording:
        choose_recording(page, tmp_path)
        page.fill("#ref-text", "What I say.")
        page.click("summary")
        page.check("#option-x_vector_only_mode")
    else:
        page.click("summary")
        page.fill("#option-cfg_scale", "1.5")
    speak(page, f"frames 3 {TEXT}")
    wait(page, IS_OVER)
    page.check(f"[value={language}]", force=True)
    page.click("#copy")
    code = page.evaluate("navigator.clipboard.readText()")
    assert code == shown(page, "code")
    message = list(server.engine.messages.values())[-1]
    command = ["sh", "-c", code] if language == "curl" else [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    again = list(server.engine.messages.values())[-1]
    assert again is not message and again.request.text == f"frames 3 {TEXT}"
    assert (again.request, again.references, again.model) == (
        message.request,
        message.references,
        message.model,
    )
    file = io.BytesIO((tmp_path / "speech.wav").read_bytes())
    assert file.getvalue()[44:] == b"".join(map(frame, range(3)))


def test_the_code_shows_the_last_request_until_a_setting_changes(page, server):
    assert '"seed"' not in shown(page, "code")
    speak(page, "frames 1")
    wait(page, IS_OVER)
    seed = asked_last(server)["seed"]
    assert f'"seed": {seed}' in shown(page, "code") and shown(page, "seed-used") == str(seed)
    page.fill("#input", "frames 2")
    assert '"seed"' not in shown(page, "code") and "frames 2" in shown(page, "code")
    page.click("#keep-seed")
    page.click("#speak")
    wait(page, f"playground.take.length === 200 && {IS_OVER}")
    assert asked_last(server)["seed"] == seed


@pytest.mark.parametrize(
    ("level", "num_s", "judgement"),
    [
        (0.5, 2, "2.0 s, peak -6 dB: good"),
        (0.5, 0.5, "0.5 s, peak -6 dB: too short; use 1 to 30 s"),
        (0.5, 31, "31.0 s, peak -6 dB: too long; use 1 to 30 s"),
        (0.01, 2, "2.0 s, peak -40 dB: very quiet; move closer to the microphone"),
        (1, 2, "2.0 s, peak 0 dB: clipped; record it with less gain"),
    ],
)
def test_a_recording_gets_a_verdict(page, tmp_path, level, num_s, judgement):
    """The recording has two channels, at the rate that the page decodes to."""
    samples = np.full((round(48000 * num_s), 2), level, np.float32)
    choose_recording(page, tmp_path, samples=samples, rate_hz=48000)
    assert shown(page, "ref-facts") == f"the speaker's.wav: {judgement}"


def test_a_file_that_is_not_audio_is_reported(page, tmp_path):
    (tmp_path / "x.wav").write_bytes(b"RIFF and then nothing that is audio")
    page.select_option("#model", "cloner")
    page.set_input_files("#ref-file", tmp_path / "x.wav")
    sync_api.expect(page.locator("#ref-facts")).to_have_text(
        "x.wav: this browser cannot read the file, but the server may be able to"
    )
    speak(page, "frames 1")
    sync_api.expect(page.locator("[data-field=ref_audio] .error")).to_contain_text("ref_audio cannot be used")


def test_the_microphone_can_be_recorded(page, server):
    page.select_option("#model", "cloner")
    page.click("#record")
    wait(page, r"/^Recording: (1\.[5-9]|[2-9])/.test(document.querySelector('#ref-facts').textContent)")
    assert page.is_visible("#ref-level") and shown(page, "record") == "Stop recording"
    page.click("#record")
    page.wait_for_selector("#ref-heard:visible")
    assert not page.is_visible("#ref-level") and shown(page, "ref-facts").startswith("reference.wav: ")
    speak(page, "frames 1")
    wait(page, IS_OVER)
    [reference] = list(server.engine.messages.values())[-1].references
    assert reference.clip.duration_s >= 1 and np.abs(np.frombuffer(reference.clip.samples, "<f4")).max() > 0.1


def test_the_page_asks_for_the_api_key(visit, tmp_path):
    with Server(tmp_path, api_key=KEY) as server:
        page = visit(server, is_ready=False)
        page.wait_for_selector("#locked:visible")
        assert page.is_disabled("#speak")
        page.fill("#key", "sk-wrong")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#key-error")).to_contain_text("the API key of this server")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#speak:enabled")
        assert not page.is_visible("#locked")
        speak(page, "frames 3")
        wait(page, IS_OVER)
        assert KEY not in page.content() and '"authorization: Bearer $ZOO_API_KEY"' in shown(page, "code")
        env = {**os.environ, "ZOO_API_KEY": KEY}
        subprocess.run(
            ["sh", "-c", shown(page, "code")], cwd=tmp_path, env=env, check=True, capture_output=True
        )
        assert Path(tmp_path, "speech.wav").read_bytes()[44:] == b"".join(map(frame, range(3)))
        first, second = server.engine.asked.values()
        assert first == second


def test_the_page_waits_until_the_server_is_ready(visit, tmp_path):
    with Server(tmp_path) as server:
        server.call(server.engine.tell, protocol.Status("loading", 0.4, "reading weights"))
        until(lambda: server.http.get("/ready").status_code == 503)
        page = visit(server, is_ready=False)
        sync_api.expect(page.locator("#waiting-state")).to_have_text("Loading the model: reading weights")
        assert page.evaluate("document.querySelector('#waiting-progress').value") == 0.4
        assert page.is_disabled("#speak")
        server.call(server.engine.tell, READY)
        page.wait_for_selector("#speak:enabled")
        assert not page.is_visible("#waiting")


def test_the_page_waits_for_a_stopped_engine(visit, tmp_path):
    with Server(tmp_path) as server:
        page = visit(server)
        speak(page, "die")
        sync_api.expect(page.locator("#problem")).not_to_be_empty()
        page.wait_for_selector("#waiting:visible")
        server.start_engine()
        page.wait_for_selector("#speak:enabled")
        page.fill("#input", "frames 2")
        page.click("#speak")
        wait(page, "playground.take.length === 200")


def test_an_incomplete_answer_is_an_error(visit, tmp_path):
    with Server(tmp_path) as server:
        page = visit(server)
        speak(page, "hold 3")
        wait(page, "playground.take.length === 300")
        asyncio.run_coroutine_threadsafe(close_connections(server), server.loop).result(5)
        sync_api.expect(page.locator("#problem")).to_contain_text("The connection was lost")
        assert shown(page, "speak") == "Speak"


async def close_connections(server):
    for connection in list(server.uvicorn.server_state.connections):
        connection.transport.abort()


def test_names_from_a_model_are_shown_as_plain_text(visit, tmp_path):
    with Server(tmp_path, models=[STRANGE]) as server:
        page = visit(server)
        page.click("summary")
        assert page.locator("img").count() == 0
        assert page.locator("body").inner_text().count(NASTY) >= 3
        speak(page, f"frames 1 {NASTY}")
        wait(page, IS_OVER)
        assert server.engine.asked and page.locator("img").count() == 0


@pytest.mark.parametrize("width", [320, 390, 1440])
def test_the_page_fits_the_width(visit, server, width):
    page = visit(server, viewport={"width": width, "height": 800})
    page.select_option("#model", "cloner")
    page.click("summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_tab_moves_through_the_fields_in_order(page):
    page.focus("#input")
    visited = []
    for _ in range(8):
        page.keyboard.press("Tab")
        visited.append(
            page.evaluate("(({ id, name, localName }) => id || name || localName)(document.activeElement)")
        )
    assert visited == ["speak", "pause", "model", "voice", "language", "summary", "language-of-code", "copy"]
