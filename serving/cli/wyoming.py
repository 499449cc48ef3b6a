"""The command `zoo wyoming`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

from typer import Argument, Option

from serving.cli.common import app


@app.command()
def wyoming(
    url: Annotated[
        str, Argument(metavar="URL", help="The bridge sends text to the server at this address.")
    ] = "http://127.0.0.1:8000",
    host: Annotated[
        str, Option(help="The bridge listens on this address; 0.0.0.0 means every interface.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="The bridge listens on this port.")] = 10200,
    languages: Annotated[
        list[str],
        Option(
            "--language",
            metavar="CODE",
            help="The bridge announces models that do not list their languages with this one (en, de, pt-BR, ...). "
            "May be repeated.",
        ),
    ] = ["en"],  # noqa: B006
    api_key: Annotated[
        str | None, Option(envvar="ZOO_API_KEY", help="The bridge sends this API key to the server.")
    ] = None,
) -> int:
    """Bridge Home Assistant's Wyoming protocol to a server that `zoo serve` runs.

    Text may arrive while the model speaks.
    """
    if find_spec("wyoming") is None:
        raise ValueError("zoo wyoming needs the package wyoming: pip install -e '.[wyoming]'")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} must begin with http:// or https://")
    from serving.tools.wyoming import Upstream, serve

    print(f"zoo: Wyoming on tcp://{host}:{port}, connected to {url}", file=sys.stderr, flush=True)
    serve(
        f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}",
        Upstream(url, api_key or None, languages),
    )
    return 0
