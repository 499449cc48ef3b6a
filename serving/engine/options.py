"""Options of the engine."""

from __future__ import annotations

import msgspec

from serving.settings import EngineArguments, ModelOptions


class Options(ModelOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    models: dict[str, str]  # their directories, by the id that clients know
    # None: 8 on a CPU, or more for throughput; on a GPU as many as there is memory for, 256 at most
    max_slots: int | None = None
    kv_memory_bytes: int | None = None
    swap_memory_bytes: int | None = None  # of the host, for paused streams' pages
    policy: str = "streaming"
    run_async: bool = True  # a GPU's reports are read one launch late
    max_waiting: int = 256  # requests of each model
    max_ttfa_s: float | None = None  # a request that would be heard later is refused
    max_unread_s: float = 30.0  # audio that a client may leave
    max_stall_s: float = 60.0  # for which a client may leave so much
    reference_memory_bytes: int = 256 << 20  # of recordings that wait to be encoded

    @classmethod
    def of(cls, arguments: EngineArguments) -> Options:
        settings = arguments.settings
        return cls(
            models=settings.models,
            **msgspec.structs.asdict(settings.model),
            **msgspec.structs.asdict(settings.latency),
            max_slots=settings.memory.max_slots,
            kv_memory_bytes=settings.memory.kv_memory_bytes,
            swap_memory_bytes=settings.memory.swap_memory_bytes,
            reference_memory_bytes=settings.memory.reference_memory_bytes,
            max_waiting=settings.limits.waiting,
            max_unread_s=settings.limits.unread_s,
            max_stall_s=settings.limits.stall_s,
        )
