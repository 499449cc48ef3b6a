"""The facts of the gateway, for the router that Ray Serve makes in its process. Serve copies the router's
module, so the table is in a separate module, of which a process has only one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from serving.cluster.link import Address
from serving.cluster.routing import Ask


class Table:
    """route: returns the replicas that a request may go to, the soonest first. update: is told all replicas
    that take new requests."""

    route: Callable[[Ask], list[str]]
    update: Callable[[Mapping[str, Address]], None]


TABLE = Table()
