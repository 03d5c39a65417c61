"""Where to listen: on the port that people expect if it is free, on one of the next if it is not.

The sockets are opened here and handed on, so that no one else can take a port between finding and using it.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Collection

from headgate_services.demo.errors import DemoError

_LAST_PORT = 65_535
_NEXT_PORTS = 100  # how many are tried before any will do
_NOT_TO_BE_HAD = (errno.EADDRINUSE, errno.EACCES)


def listen_near(host: str, port: int, reserved: Collection[int] = ()) -> socket.socket:
    """Listen on a port or, if it is taken, on one of the next.

    Args:
        host: An address of the loopback interface.
        port: The port wanted; 0 for any.
        reserved: Ports that others will ask for.

    Raises:
        DemoError: There is no such address.
    """
    following = range(port + 1, min(port + _NEXT_PORTS, _LAST_PORT + 1)) if port else ()
    for candidate in (port, *(each for each in following if each not in reserved)):
        try:
            return listen(host, candidate)
        except PortTaken:
            continue
    return listen(host, 0)


class PortTaken(DemoError):
    """Another program listens there, or only root may."""


def listen(host: str, port: int) -> socket.socket:
    """Listen on exactly this port.

    Raises:
        PortTaken: It is not to be had.
        DemoError: There is no such address.
    """
    if not 0 <= port <= _LAST_PORT:
        raise DemoError(f"{port} is not a port; they go from 0 to {_LAST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise DemoError(f"cannot listen on {host!r}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # Connections of a demo that has just ended do not matter; one that still listens does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno in _NOT_TO_BE_HAD:
            raise PortTaken(f"port {port} on {host} is taken") from error
        raise DemoError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return where a socket is reached over HTTP."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_loopback(host: str) -> None:
    """Refuse an address that others could reach: nothing in the demo asks who is calling.

    Raises:
        DemoError: It is such an address.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise DemoError(
            f"the demo has no authentication, so it listens on this machine only: 127.0.0.1, not {host!r}"
        )
