"""The kinds of clients, and how often each comes."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tests.soak import conversations, demand
from tests.soak.clients import MAX_BATCH, Client, Heard

STAGES = ("headers", "first audio", "later")  # when a client disconnects or cancels
FORMS = ("stream", "file", "events", "batch")

Act = Callable[[Client, random.Random, int], Awaitable[Heard]]


class Kind(NamedTuple):
    """needs: of `Material.abilities`; empty for a client that every soak has. in_kills: codes of errors that
    are right while processes are killed, next to those of a server that starts again."""

    weight: float
    act: Act
    needs: str = ""
    in_kills: tuple[str, ...] = ()


KINDS = {
    "stream": Kind(28, lambda client, chance, _: client.stream(chance.choice(client.short))),
    "file": Kind(14, lambda client, chance, _: client.file(chance.choice(client.short))),
    "events": Kind(8, lambda client, chance, _: client.events(chance.choice(client.short))),
    "batch": Kind(
        3, lambda client, chance, _: client.batch(chance.sample(client.short, chance.randint(1, MAX_BATCH)))
    ),
    "flexible": Kind(
        6, lambda client, chance, _: client.stream(chance.choice(client.short), service_tier="flex")
    ),
    "long text": Kind(2, lambda client, chance, _: client.stream(chance.choice(client.long))),
    "text in portions": Kind(
        8, lambda client, chance, _: client.portions(chance.choice(client.in_session), chance)
    ),
    "cancelled session": Kind(
        4,
        lambda client, chance, _: client.cancel(
            chance.choice(client.in_session), chance.choice(STAGES), chance
        ),
    ),
    "disconnected": Kind(
        8,
        lambda client, chance, _: client.leave(
            chance.choice(client.short + client.long), chance.choice(STAGES)
        ),
    ),
    "disconnected soon": Kind(
        6,
        lambda client, chance, _: client.leave_soon(
            chance.sample(client.short, MAX_BATCH), chance.choice(FORMS), chance.random()
        ),
    ),
    "slow reader": Kind(2, lambda client, chance, _: client.slow(chance.choice(client.long))),
    "reader that stops": Kind(1, lambda client, chance, _: client.deaf(chance.choice(client.long))),
    "uploaded voice": Kind(
        3,
        lambda client, chance, index: client.life_of_a_voice(chance.choice(client.kept), f"churn-{index}"),
    ),
    "damaged recording": Kind(
        4, lambda client, chance, index: client.damaged(index, chance.choice(client.kept))
    ),
    "invalid request": Kind(4, lambda client, chance, _: client.invalid(chance.getrandbits(30))),
    "broken HTTP": Kind(2, lambda client, chance, _: client.broken_http(chance.getrandbits(30))),
    "broken session": Kind(2, lambda client, chance, _: client.broken_session(chance.getrandbits(30))),
    "answer": Kind(
        8,
        lambda client, chance, _: client.answer(chance.choice(client.talks)),
        needs="answers",
        in_kills=("audio_not_found",),  # the HTTP process keeps the tokens of answers
    ),
    "answer in a stream": Kind(
        8,
        lambda client, chance, _: client.answer_in_stream(
            chance.choice(conversations.streaming(client.talks))
        ),
        needs="answers",
    ),
    "disconnected answer": Kind(
        3,
        lambda client, chance, _: client.leave_answer(chance.choice(conversations.streaming(client.talks))),
        needs="answers",
    ),
    "work": Kind(
        0.7,
        lambda client, chance, _: client.work(chance),
        needs="works",
        in_kills=("invalid_document", "join_failed"),  # the process that reads or joins is killed
    ),
    "deleted work": Kind(
        0.7,
        lambda client, chance, _: client.deleted_work(chance),
        needs="works",
        in_kills=("invalid_document",),
    ),
    "abandoned work": Kind(
        0.4,
        lambda client, chance, _: client.abandoned_work(chance.random()),
        needs="works",
        in_kills=("invalid_document",),
    ),
    "model on demand": Kind(
        1.0,
        lambda client, chance, _: client.on_demand(chance.choice(list(demand.MODELS))),
        needs="on demand",
    ),
}
