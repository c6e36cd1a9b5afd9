"""HTTP from the test process to Services and pods, with nothing in between.

In the project's own cluster a socket is made in the control plane's network namespace and then
used like any other: what the other end does (a reset, silence, one chunk at a time) is what the
test sees. In a cluster of KUBECONFIG it is `kubectl port-forward`.
"""

import asyncio
import ctypes
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpcore
import httpx

from support.kubectl import Kubectl
from support.progress import wait_for

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

HTTP_TIMEOUT = httpx.Timeout(30, connect=5)


class Reach(Protocol):
    """Ways to a target: `svc/NAME` or `pod/NAME`, and a port of it."""

    def http(self, kubectl: Kubectl, target: str, port: int, **options: Any) -> httpx.Client: ...

    def async_http(
        self, kubectl: Kubectl, target: str, port: int, **options: Any
    ) -> httpx.AsyncClient: ...

    def close(self) -> None: ...


class Inside:
    """From within the network namespace of the control plane."""

    def __init__(self, namespace: Path) -> None:
        self._namespace = namespace

    def http(self, kubectl: Kubectl, target: str, port: int, **options: Any) -> httpx.Client:
        transport = httpx.HTTPTransport()
        transport._pool = httpcore.ConnectionPool(
            network_backend=_Backend(self._namespace), max_connections=None
        )
        url = f"http://{address_of(kubectl, target)}:{port}"
        return httpx.Client(transport=transport, base_url=url, **_defaults(options))

    def async_http(
        self, kubectl: Kubectl, target: str, port: int, **options: Any
    ) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport()
        transport._pool = httpcore.AsyncConnectionPool(
            network_backend=_AsyncBackend(self._namespace), max_connections=None
        )
        url = f"http://{address_of(kubectl, target)}:{port}"
        return httpx.AsyncClient(transport=transport, base_url=url, **_defaults(options))

    def close(self) -> None:
        """Nothing is held: the clients are the caller's."""


class PortForwards:
    """Through the API server. One forward per target, begun anew when it has ended."""

    def __init__(self) -> None:
        self._running: dict[tuple[str | None, str, int], tuple[subprocess.Popen[str], int]] = {}

    def http(self, kubectl: Kubectl, target: str, port: int, **options: Any) -> httpx.Client:
        url = f"http://127.0.0.1:{self.port(kubectl, target, port)}"
        return httpx.Client(base_url=url, **_defaults(options))

    def async_http(
        self, kubectl: Kubectl, target: str, port: int, **options: Any
    ) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self.port(kubectl, target, port)}"
        return httpx.AsyncClient(base_url=url, **_defaults(options))

    def port(self, kubectl: Kubectl, target: str, port: int) -> int:
        """A port of the host's loopback that leads to the target's."""
        key = (kubectl.namespace, target, port)
        known = self._running.get(key)
        if known is not None and known[0].poll() is None:
            return known[1]
        forward = kubectl.start(
            "port-forward", target, f":{port}", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert forward.stdout is not None
        line = forward.stdout.readline()
        match = re.search(r"127\.0\.0\.1:(\d+) ->", line)
        if match is None:
            forward.kill()
            forward.wait()
            raise RuntimeError(f"no port-forward to {target}:{port}: {line.strip()}")
        self._running[key] = (forward, int(match[1]))
        return int(match[1])

    def close(self) -> None:
        for forward, _ in self._running.values():
            forward.terminate()
            forward.wait()
            if forward.stdout is not None:
                forward.stdout.close()
        self._running.clear()


def address_of(kubectl: Kubectl, target: str) -> str:
    """The address of `svc/NAME` or `pod/NAME`, once it has one."""
    kind, name = target.split("/")

    def known() -> str:
        found = kubectl.get(kind, name)
        if kind == "pod":
            return str(found.get("status", {}).get("podIP", ""))
        address = str(found["spec"].get("clusterIP", ""))
        if address == "None":
            raise ValueError(f"{target} is headless: name one of its pods")
        return address

    return wait_for(f"{target} has an address", known, 60)


@contextmanager
def network_of(namespace: Path) -> Iterator[None]:
    """Puts this thread, and no other, into a network namespace. Never await in it."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        other = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(other)
        finally:
            os.close(other)
        try:
            yield
        finally:
            _setns(own)
    finally:
        os.close(own)


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    return {"timeout": HTTP_TIMEOUT, "trust_env": False, **options}


class _Backend(httpcore.SyncBackend):
    def __init__(self, namespace: Path) -> None:
        self._namespace = namespace

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        with network_of(self._namespace):
            return super().connect_tcp(host, port, timeout, local_address, socket_options)


class _AsyncBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, namespace: Path) -> None:
        self._namespace = namespace

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        with network_of(self._namespace):
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(timeout):
                await asyncio.get_running_loop().sock_connect(made, (host, port))
            return _AsyncStream(*await asyncio.open_connection(sock=made))
        except TimeoutError as error:
            made.close()
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            made.close()
            raise httpcore.ConnectError(str(error)) from error
        except BaseException:
            made.close()
            raise

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _AsyncStream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(buffer)
                await self._writer.drain()
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._writer.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # asked of an idle connection: has the server closed it?
            return self._reader.at_eof() or self._reader.exception() is not None
        return self._writer.get_extra_info(info)
