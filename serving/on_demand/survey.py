"""The messages of the process that surveys a directory of models (engine/survey.py) to the gateway."""

from __future__ import annotations

import msgspec

from serving import protocol


class SurveyedModel(msgspec.Struct):
    """A model that a family recognises. planned_bytes: of the device, with `max_slots` slots and
    `kv_memory_bytes`."""

    info: protocol.ModelInfo
    directory: str
    max_slots: int
    kv_memory_bytes: int
    planned_bytes: int


class Survey(protocol.Message):
    """All models. room_bytes: what the device can give them together."""

    models: list[SurveyedModel]
    room_bytes: int


decoder = msgspec.msgpack.Decoder(protocol.Status | Survey)
