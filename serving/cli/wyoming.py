"""zoo wyoming."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

from typer import Argument, Option

from serving.cli.common import app


@app.command()
def wyoming(
    url: Annotated[
        str, Argument(metavar="URL", help="A server that `zoo serve` runs.")
    ] = "http://127.0.0.1:8000",
    host: Annotated[str, Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535)] = 10200,
    languages: Annotated[
        list[str],
        Option(
            "--language",
            metavar="CODE",
            help="What models speak that do not tell their languages: en, de, pt-BR, ...; several times.",
        ),
    ] = ["en"],  # noqa: B006
    api_key: Annotated[
        str | None, Option(envvar="ZOO_API_KEY", help="The server's key, where it asks for one.")
    ] = None,
) -> int:
    """Let Home Assistant speak with a server: its Wyoming protocol, text in while it speaks included."""
    if find_spec("wyoming") is None:
        raise ValueError("the package wyoming must be installed: pip install 'speechzoo[wyoming]'")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} must begin with http:// or https://")
    from serving import logs
    from serving.tools.wyoming import Upstream, serve

    logs.configure("wyoming")
    print(f"zoo: Wyoming on tcp://{host}:{port}, speaking with {url}", file=sys.stderr, flush=True)
    serve(
        f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}",
        Upstream(url, api_key or None, languages),
    )
    return 0
