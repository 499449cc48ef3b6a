"""Valid and invalid requests by the OpenAPI schema, route by route."""

from __future__ import annotations

from collections import Counter
from typing import Any

import schemathesis
from hypothesis import given, seed
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from serving.http.schemas import FIELDS
from tests.attack.target import Target
from tests.fuzz.trials import trials

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
WEIGHTS = {"POST": 6}  # tries of a method, otherwise 1: bodies can be wrong in more ways
SPEECH, SPEECH_WEIGHT = "/v1/audio/speech", 12
FOREIGN = (
    "ref_audio",
    "ref_text",
    "references",
    "task_type",
    "language",
    "instructions",
    "x_vector_only_mode",
    "normalize",
    "timestamp_granularities",
)
MAX_FRAMES = 4  # for requests without max_new_tokens


def fuzz(target: Target, examples: int, start: int) -> Counter[str]:
    """Return requests by route and status. Raises the first failure, shrunk."""
    page = schemathesis.openapi.from_url(target.url + "/schema/openapi.json")
    operations = [one.ok() for one in page.get_all_operations()]
    tries = [(one, mode) for one in operations for mode in GenerationMode if has_wrongs(one, mode)]
    weights = [weight_of(one) for one, _ in tries]
    counts: Counter[str] = Counter()
    for number, (operation, mode) in enumerate(tries):
        num = max(1, -(-examples * weights[number] // sum(weights)))
        try_operation(operation, mode, num, start + number, counts)
    return counts


def weight_of(operation: Any) -> int:
    return SPEECH_WEIGHT if operation.path == SPEECH else WEIGHTS.get(operation.method.upper(), 1)


def has_wrongs(operation: Any, mode: GenerationMode) -> bool:
    """Return whether invalid requests exist: a path accepts any text, so only bodies can be invalid."""
    return mode is GenerationMode.POSITIVE or bool(operation.body)


def mend(body: dict[str, Any]) -> None:
    """Make a valid speech request one that the engine probably serves.

    A generated request names a random model and voice, so it would rarely reach the engine. This names served
    ones, and removes unknown fields and those of other models."""
    for name in (*FOREIGN, *set(body) - set(FIELDS[SPEECH])):
        body.pop(name, None)
    if body.get("stream_format") == "sse":
        body["stream"] = True
    body |= {"model": "tiny", "voice": "vivian", "input": body["input"][:100].strip() or "Hello."}
    body["max_new_tokens"] = min(body["max_new_tokens"] or MAX_FRAMES, 50)


def try_operation(operation: Any, mode: GenerationMode, num: int, start: int, counts: Counter[str]) -> None:
    @seed(start)
    @trials(num)
    @given(case=operation.as_strategy(generation_mode=mode), is_mended=st.booleans())
    def tried(case: Any, is_mended: bool) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "input" in case.body:
            case.body.setdefault("max_new_tokens", MAX_FRAMES)
            if is_mended:
                mend(case.body)
        answer = case.call_and_validate(checks=CHECKS, timeout=60)
        counts[f"{operation.method.upper()} {operation.path} {mode.value}: {answer.status_code}"] += 1

    tried()
