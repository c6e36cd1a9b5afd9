"""Ports of this machine: is one free, and find some that stay so."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from stopway_cli.errors import CliError, Exit

_SPAN = 12_000

# Ports that this process has given away, in that order: nobody may listen there yet.
_given: dict[int, None] = {}


def check_free(host: str, port: int) -> None:
    """Raise ``CliError`` unless a server could listen on ``host``:``port``.

    Where one could, ``free_ports`` does not give that port to another one.
    """
    try:
        _probe(host, port)
        _give(port)
    except (PermissionError, OverflowError):
        raise CliError(
            f"port {port} may not be used by this user; choose one above 1023 with --port",
            Exit.PORT,
        ) from None
    except socket.gaierror:
        raise CliError(
            f"{host!r} is no address of this machine; use --host 127.0.0.1 or 0.0.0.0", Exit.PORT
        ) from None
    except OSError as error:
        if _is_in_use(error):
            raise CliError(
                f"port {port} on {host} is in use; stop what listens there, or choose another "
                "with --port (0 takes any free one)",
                Exit.PORT,
            ) from None
        raise CliError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port",
            Exit.PORT,
        ) from None


def free_ports(count: int, host: str) -> list[int]:
    """``count`` different free ports below the kernel's range for outgoing connections.

    So no outgoing connection can take one while its process is being restarted. None is given
    twice by this process, until all have been: then again those first that were given first.
    Raises ``CliError`` when there are too few.
    """
    found: list[int] = []
    low = _ephemeral_low()
    candidates = range(max(1024, low - _SPAN), low)
    fresh = [port for port in candidates if port not in _given]
    again = [port for port in _given if port in candidates]
    for port in random.SystemRandom().sample(fresh, len(fresh)) + again:
        if len(found) == count:
            break
        try:
            _probe(host, port)
        except OSError:
            continue
        found.append(port)
    if len(found) < count:
        raise CliError(f"only {len(found)} of {count} ports are free on {host}", Exit.PORT)
    for port in found:
        _give(port)
    return found


def _give(port: int) -> None:
    _given.pop(port, None)  # so that it is the last in their order
    _given[port] = None


def _probe(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)


def _is_in_use(error: OSError) -> bool:
    import errno

    return error.errno == errno.EADDRINUSE


def _ephemeral_low() -> int:
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = 32_768
    return low if low > 4096 else 32_768
