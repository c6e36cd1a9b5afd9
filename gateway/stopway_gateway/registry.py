"""Which leaders there are: from a file, or from a name that resolves to the ready ones."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stopway_gateway.config import Settings
from stopway_gateway.metrics import GroupLoad
from stopway_gateway.session import LeaderSession
from stopway_gateway.tasks import end_tasks

_LOG = logging.getLogger(__name__)
Found = dict[str, str]  # url -> group name, empty while it is not known


class Registry:
    """Keeps one session per leader.

    The list has those that are ready. A group that drains, or whose ranks form anew, is not on it,
    and may hold requests of any gateway: one that left keeps its session until its front ends it,
    or until another leader of its group has replaced it and nothing of this gateway is there.
    """

    def __init__(self, settings: Settings, make: Callable[[str, str], LeaderSession]) -> None:
        self._settings = settings
        self._make = make
        self._sessions: dict[str, LeaderSession] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, then every ``groups_poll_s``."""
        await self._poll()
        self._task = asyncio.create_task(self._watch(), name="groups")

    async def close(self) -> None:
        """Break every lease."""
        await end_tasks(self._task)
        await asyncio.gather(*(session.close() for session in self._sessions.values()))

    def sessions(self) -> list[LeaderSession]:
        """All of them, ready or not."""
        return list(self._sessions.values())

    def ready(self) -> list[LeaderSession]:
        """Those that new requests may go to."""
        return [session for session in self._sessions.values() if session.ready]

    def of_group(self, group: str) -> LeaderSession | None:
        """The session of a group; of two, the one that is connected, and newer."""
        found = [session for session in self._sessions.values() if session.group == group]
        found.sort(key=lambda session: (session.connected, session.epoch or 0))
        return found[-1] if found else None

    def compare_epochs(self) -> None:
        """Of two leaders of one group, the one with the older epoch is over.

        That is a pod that was replaced and can't be told so: what runs there ends here, and with
        the session its lease.
        """
        newest: dict[str, int] = {}
        for session in self._sessions.values():
            newest[session.group] = max(newest.get(session.group, 0), session.epoch or 0)
        for session in self._sessions.values():
            session.supersede(session.epoch is not None and session.epoch < newest[session.group])

    def groups(self) -> list[str]:
        """The names of all known groups."""
        return sorted({s.group for s in self._sessions.values() if s.group})

    def loads(self) -> Iterable[GroupLoad]:
        """(group, its last load), for the metrics: once each, while pods replace each other."""
        for group in self.groups():
            session = self.of_group(group)
            if session is not None and session.connected:
                yield group, session.load

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.groups_poll_s)
            await self._poll()

    async def _poll(self) -> None:
        try:
            if self._settings.groups_file:
                found = _read_file(Path(self._settings.groups_file))
            elif self._settings.groups_dns:
                found = await _resolve(self._settings.groups_dns)
            else:
                found = {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            # A file being written, a name server that hiccups: what is known stays true.
            _LOG.debug("the groups can't be read now: %s", error)
            return
        await self._apply(found)

    async def _apply(self, found: Found) -> None:
        for url, name in found.items():
            session = self._sessions.get(url)
            if session is None:
                self._sessions[url] = session = self._make(url, name)
                session.start()
            session.retire(False)
        gone = []
        for url, session in list(self._sessions.items()):
            if url in found:
                continue
            session.retire(True)
            if not session.connected or (session.superseded and not session.live):
                gone.append(self._sessions.pop(url))
        await asyncio.gather(*(session.close() for session in gone))


def _read_file(path: Path) -> Found:
    groups = json.loads(path.read_text(encoding="utf-8"))["groups"]
    return {str(group["url"]).rstrip("/"): str(group.get("name", "")) for group in groups}


async def _resolve(host_port: str) -> Found:
    host, _, port = host_port.rpartition(":")
    async with asyncio.timeout(5.0):
        try:
            infos: list[tuple[Any, ...]] = await asyncio.get_running_loop().getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM
            )
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
                return {}  # the name is known and nobody is ready
            raise
    urls = []
    for family, *_, address in infos:
        ip = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
        urls.append(f"http://{ip}:{address[1]}")
    return dict.fromkeys(urls, "")
