"""In place of speaches' conftest.py, whose clients call its own app in the same process: the same fixtures with clients
of the server at ZOO_URL. `run.py` copies this file next to the tests, as conftest.py."""

import os
import shutil
import sys
from types import ModuleType

import httpx
import imageio_ffmpeg
import openai
import pydub
import pytest
import pytest_asyncio

# What the tests import of speaches: the formats of its API.
formats = ("pcm", "mp3", "wav", "flac", "opus", "aac")
types = ModuleType("speaches.api_types")
types.SpeechResponseFormat, types.SUPPORTED_SPEECH_RESPONSE_FORMATS = str, formats
types.DEFAULT_SPEECH_RESPONSE_FORMAT = "mp3"
sys.modules["speaches"], sys.modules["speaches.api_types"] = ModuleType("speaches"), types

pydub.AudioSegment.converter = imageio_ffmpeg.get_ffmpeg_exe()
if shutil.which("ffprobe") is None:  # without its facts, pydub decodes to 16 bits, as with them
    pydub.audio_segment.mediainfo_json = lambda *args, **options: None


@pytest_asyncio.fixture
async def aclient():
    async with httpx.AsyncClient(base_url=os.environ["ZOO_URL"], timeout=120) as client:
        yield client


@pytest.fixture
def openai_client(aclient):
    url = os.environ["ZOO_URL"] + "/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", http_client=aclient, max_retries=0)


@pytest.fixture
def pull_model_without_cleanup():
    """The model is served already."""


def pytest_collection_modifyitems(config, items):
    """Leave out tests of OpenAI's own server."""
    items[:] = [item for item in items if item.get_closest_marker("requires_openai") is None]
