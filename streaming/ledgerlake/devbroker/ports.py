"""TCP ports for a broker of our own, which it keeps over its restarts.

A port from the system's ephemeral range may become the local end of any outgoing connection between
two starts of the broker, which then cannot listen. So ports are taken from below that range.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_START = 32768
_LOWEST = 10000
_TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports of 127.0.0.1 on which nothing listens.

    Raises:
        OSError: no free ports were found.
    """
    candidates = range(_LOWEST, max(_first_ephemeral(), _LOWEST + _TRIES))
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(candidates, _TRIES):
            if len(ports) == count:
                return ports
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                ports.append(port)
    raise OSError(f"no {count} free ports between {candidates.start} and {candidates.stop - 1}")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether this process may listen on a port of an address of this machine."""
    with socket.socket() as listener:
        # Connections of a broker that has just ended are no hindrance.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_START
