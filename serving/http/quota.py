"""Limits on the resources that clients hold in the HTTP process: bodies being read, recordings being decoded,
open sessions, and bytes of memory. Nothing waits: over the limit, the client gets 503 immediately."""

from __future__ import annotations

import ipaddress
from collections import Counter, deque
from contextvars import ContextVar
from types import TracebackType

from litestar.exceptions import HTTPException
from litestar.types import Scope

from serving.http.errors import refusal

RETRY_S = 1
MAX_HELD_TO_FREE = 3  # one address holds at most three times of what is free, so three quarters of a quota
SITE_BITS = 64  # of an IPv6 address: the rest is the host's own choice
client_address: ContextVar[str] = ContextVar("client_address", default="")


class Quota:
    """A limit of `maximum` units that requests hold at the same time. No address can hold all of them.

    what: completes "too many ...". is_bytes: whether the units are bytes, for the message.
    """

    def __init__(self, maximum: int, what: str, *, is_bytes: bool = False):
        self.maximum, self.what, self.is_bytes = maximum, what, is_bytes
        self._held: Counter[str] = Counter()  # by address
        # A finalizer may run in any thread and within any statement; appending to a deque is safe even then.
        self._returned: deque[tuple[str, int]] = deque()

    def take(self, num: int = 1) -> Share:
        """Take units for the client of the current request. Raises the refusal (503) if there are not
        enough."""
        share = Share(self, client_address.get())
        share.resize(num)
        return share

    @property
    def num_held(self) -> int:
        self._settle()
        return self._held.total()

    def change(self, address: str, num: int) -> None:
        """Add units to those of an address. A negative number may come from any thread. Raises the
        refusal."""
        if num < 0:
            self._returned.append((address, num))
            return
        self._settle()
        if not self._has_room(address, num):
            raise self._refusal(address, num)
        self._held[address] += num

    def _has_room(self, address: str, num: int) -> bool:
        held, free = self._held[address] + num, self.maximum - self._held.total() - num
        return free >= 0 and (held == num or held <= MAX_HELD_TO_FREE * free)

    def _settle(self) -> None:
        while self._returned:
            address, num = self._returned.popleft()
            self._held[address] += num
            if not self._held[address]:
                del self._held[address]

    def _refusal(self, address: str, num: int) -> HTTPException:
        limit = f"{self.maximum >> 20} MiB" if self.is_bytes else str(self.maximum)
        is_own_fault = self.maximum - self._held.total() >= num
        whose = " for one client" if is_own_fault else ""
        message = f"too many {self.what}{whose} (limit: {limit}); try again in {RETRY_S} s"
        return refusal(503, message, code="server_busy", retry_after_s=RETRY_S)


class Share:
    """The units of a quota that one request holds. As a context manager it is released at the end."""

    def __init__(self, quota: Quota, address: str):
        self.quota, self.address, self.num = quota, address, 0

    def resize(self, num: int) -> None:
        """Hold `num` units from now on. Raises the refusal for more than there are."""
        if num != self.num:
            self.quota.change(self.address, num - self.num)
            self.num = num

    def release(self) -> None:
        """Give everything back. Safe in any thread, and more than once."""
        self.resize(0)

    def hand_over(self) -> Share:
        """Return a share of the same size in place of this one."""
        own = Share(self.quota, self.address)
        own.num, self.num = self.num, 0
        return own

    def __enter__(self) -> Share:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def remember_client(scope: Scope) -> None:
    """Charge the current task's shares to the client of this connection."""
    client = scope.get("client")
    client_address.set("" if client is None else site_of(client[0]))


def site_of(address: str) -> str:
    """Return the part of an address that its owner cannot choose: IPv4 whole, IPv6 up to its subnet."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket's
        return address
    if isinstance(ip, ipaddress.IPv4Address) or ip.ipv4_mapped is not None:
        return str(getattr(ip, "ipv4_mapped", None) or ip)
    return str(ipaddress.ip_network((ip, SITE_BITS), strict=False))
