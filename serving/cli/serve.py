"""The command `zoo serve`."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Annotated

from typer import Argument

from serving.cli.common import app, named_directories, repository_names, writable_directory
from serving.cli.flags import with_groups
from serving.cli.limit_flags import Limits
from serving.cli.on_demand_flags import OnDemand
from serving.cli.serve_flags import Latency, Listening, Logs, Memory, Model, Replicas, Security
from serving.cli.works_flags import Works
from serving.settings import URL_SECRET
from zoo import SMALL_VOICE


@app.command()
@with_groups
def serve(
    listening: Listening,
    model: Model,
    on_demand: OnDemand,
    memory: Memory,
    latency: Latency,
    limits: Limits,
    security: Security,
    replicas: Replicas,
    works: Works,
    logs: Logs,
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL",
            help="Each MODEL is a directory, or ORG/NAME on the Hugging Face Hub; MODEL+DIR adds a LoRA "
            "adapter, NAME=MODEL chooses the id for clients. Without one, the server uses the bundled small "
            "voice.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
) -> int:
    """Serve models over HTTP with OpenAI's speech API."""
    from rich.console import Console

    from serving import supervisor
    from serving.settings import Settings
    from serving.status_line import StatusLine

    logs.check()
    replicas.check()
    on_demand.check(models, model.device_map, replicas.settings())
    kept = on_demand.settings()
    served = named_directories(models or [str(SMALL_VOICE)]) if kept is None else on_demand.directories()
    voices_dir = listening.voices_dir
    settings = Settings(
        models=served,
        host=listening.host,
        port=listening.port,
        playground=listening.playground,
        voices_dir=None if voices_dir is None else writable_directory(voices_dir, "--voices-dir"),
        pronunciations=model.pronunciations_path(),
        sentence_gap_s=model.sentence_gap_s,
        aligner=model.aligner_settings(),
        works=works.settings(),
        grace_s=listening.grace_s,
        otel=logs.otel,
        replicas=replicas.settings(),
        on_demand=kept,
        model=model.options(),
        aliases=model.names(served, repository_names(models)),
        memory=memory.settings(),
        latency=latency.settings(),
        limits=limits.settings(security, memory.http_memory_bytes()),
        security=security.settings(),
    )
    if logs.log is not None:
        os.environ["ZOO_LOG"] = logs.log  # for this process and its two children
    env = environment(model, security)
    line = None
    if logs.has_status_line:
        line = StatusLine(Console(file=sys.stderr))
        # The children's stderr is a pipe, but the supervisor relays its lines to this terminal.
        env = {"ZOO_LOG": "text", "FORCE_COLOR": "1", **env}
    return supervisor.serve(settings, env, line)


def environment(model: Model, security: Security) -> dict[str, str]:
    """Return the environment of the children."""
    env = dict(os.environ)
    if security.api_key is not None:
        env["ZOO_API_KEY"] = security.api_key
    if security.speech_urls and not env.get(URL_SECRET):
        env[URL_SECRET] = secrets.token_hex()  # the same after a restart of the HTTP process
    if model.cache_dir is not None:
        env["ZOO_CACHE_DIR"] = str(model.cache_dir.resolve())
    return env
