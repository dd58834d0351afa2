"""Ranks on hosts of their own: network namespaces joined by a bridge, whose links can be slowed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

LINK = "eth0"
"""The interface of each host."""
MTU = 9000


class Network:
    """Hosts 10.77.0.1, 10.77.0.2, ... on one switch; made by `network`."""

    def __init__(self, prefix: str, hosts: int) -> None:
        self.switch, self.names = f"{prefix}s", [f"{prefix}h{host}" for host in range(hosts)]

    def within(self, host: int) -> Sequence[str]:
        """What a command is to be run by to run on ``host``."""
        return ["ip", "netns", "exec", self.names[host]]

    def shape(self, megabits: float | None) -> None:
        """Let each link carry so much in either direction; None for all it can."""
        for host, name in enumerate(self.names):
            for where, device in ((name, LINK), (self.switch, f"port{host}")):
                if megabits is None:
                    with contextlib.suppress(OSError):
                        _tool("tc", "-n", where, "qdisc", "del", "dev", device, "root")
                else:
                    rate = ["rate", f"{megabits:g}mbit", "burst", f"{4 * megabits:g}kb", "latency", "100ms"]
                    _tool("tc", "-n", where, "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def make(self) -> None:
        for name in (self.switch, *self.names):
            _tool("ip", "netns", "add", name)
        _tool("ip", "-n", self.switch, "link", "add", "bridge", "mtu", str(MTU), "type", "bridge")
        _tool("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            port = f"port{host}"
            ends = ["link", "add", port, "mtu", str(MTU), "type", "veth", "peer", "name", LINK]
            _tool("ip", "-n", self.switch, *ends, "mtu", str(MTU), "netns", name)
            _tool("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up")
            _tool("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", LINK)
            for device in ("lo", LINK):
                _tool("ip", "-n", name, "link", "set", device, "up")

    def remove(self) -> None:
        for name in (self.switch, *self.names):
            with contextlib.suppress(OSError):
                _tool("ip", "netns", "del", name)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def why_not() -> str | None:
    """Why namespaces cannot be made here; None where they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) not found"
    if os.geteuid() != 0:
        return "it takes root"
    try:
        with network(1) as one:
            one.shape(1000)
    except OSError as error:
        return str(error)
    return None


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Hosts for the time of the block; they go however it ends, short of SIGKILL. ``OSError`` where a tool fails."""
    made = Network(f"fg{os.getpid()}", hosts)
    with _terminated_cleanly():
        try:
            made.make()
            yield made
        finally:
            made.remove()


@contextlib.contextmanager
def _terminated_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP as an exception, so that ``finally`` is reached."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tool(*command: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise OSError(f"{' '.join(command)}: {run.stderr.strip()}")
