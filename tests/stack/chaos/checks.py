"""What must be so when all has healed, asked through the stack's public faces only."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from stopway_core.policies import POLICIES
from stopway_core.types import Outcome, Reason, finish_reason_of, outcome_of

from . import prompts
from .journal import Journal, Life, Record, Told
from .world import World, until

HEALED_S = 120.0  # a loaded machine takes long to load a model
RESOLVED_S = 30.0
IDLE_S = 20.0
DIGESTS = 128  # turns: two comparisons of the replicas' digests
ROUNDS_MAX = 10
MEMORY_MIB = 512  # resident, of one process
_LATE_S = 15.0  # a stop may reach a frozen Redis, rank or gateway this much later
_SEEN_S = 3.0  # for a client to see the end of what was disturbed before the recovery
_TERMINAL = ("reclaimed", "already_finished")
_DEADLINES = {
    Reason.DEADLINE_QUEUE: "queue",
    Reason.DEADLINE_TTFT: "first_token",
    Reason.DEADLINE_TOTAL: "total",
}
# What torch says in a rank whose peer has gone, and nothing else.
_PEER_GONE = re.compile(
    r"Connection (closed|reset)|connection (closed|reset)|[Gg]loo|Broken pipe|"
    r"DistNetworkError|DistStoreError|[Tt]imed out"
)
_FILES = ("stopway-*.log", "gateway*.log")


class Checks:
    """The end of a run. Each check notes what is wrong, and the next one goes on."""

    def __init__(self, world: World, known: list[str]) -> None:
        self._world = world
        self._known = known
        self._journal: Journal = world.journal

    async def run(self) -> None:
        """All of them, unless the stack did not come back."""
        if not await until(self._world.ready, HEALED_S):
            self._journal.wrong("not every gateway is ready: nothing else was checked")
            return
        await self._every_group_runs()
        await self._nothing_is_held()
        await self._every_request_has_its_outcome()
        await self._every_stop_is_resolved()
        await self._serves_as_before()
        await self._nothing_is_held()
        self._memory_is_bounded()
        self._logs_are_clean()

    # --- requests ----------------------------------------------------------------------------

    async def _every_request_has_its_outcome(self) -> None:
        listed: dict[Life, dict[str, dict[str, Any]]] = {}
        for gateway in (0, 1):
            life = self._world.life(gateway)
            _, body = await self._world.get(gateway, "/v1/requests", limit=1000)
            if life is None:
                self._journal.wrong(f"gateway {gateway} died after the last fault")
                continue
            for shown in body["data"]:
                self._check_shown(shown)
            listed[life] = {r["client_request_id"]: r for r in body["data"]}
        for record in self._journal.records:
            if not record.ended:
                self._journal.wrong(f"{record}: its client still waits")
            if record.life not in listed:
                continue  # its gateway was killed, and its knowledge with it
            shown = listed[record.life].get(record.name)
            if shown is None and record.uid:
                shown = await self._shown(record)
            if shown is not None:
                self._compare(record, shown)

    async def _shown(self, record: Record) -> dict[str, Any] | None:
        status, body = await self._world.get(record.life.gateway, f"/v1/requests/{record.uid}")
        if status != 200:
            self._journal.wrong(f"{record}: its gateway does not know it: {status}")
            return None
        return body

    def _check_shown(self, shown: dict[str, Any]) -> None:
        reason = shown["reason"]
        if shown["status"] != "finished" or shown["outcome"] not in list(Outcome):
            self._journal.wrong(f"a request without an outcome: {shown}")
        elif reason not in list(Reason) or outcome_of(Reason(reason)) != shown["outcome"]:
            self._journal.wrong(f"an outcome that its reason does not imply: {shown}")

    def _compare(self, record: Record, shown: dict[str, Any]) -> None:
        """One outcome: what the client saw, what the gateway tells, and what was done to it."""
        if shown["status"] != "finished":
            return  # said above
        reason = Reason(shown["reason"])
        if record.refused:
            implied = Reason.BAD_INPUT if record.status < 500 else Reason.RANK_LOST
            if reason is not implied:
                self._journal.wrong(f"{record}: was refused, its gateway tells {reason}: {shown}")
            return
        if not self._given(record, shown, reason):
            self._journal.wrong(f"{record}: ended by {reason}, which nobody gave: {shown}")
        if record.left or record.broken:
            return
        if record.error is not None:
            seen = {str(record.error.get("code"))}
        else:
            seen = {
                str(stop_reason) if finish == "abort" else finish
                for finish, stop_reason in record.ends.values()
            }
        finish = finish_reason_of(reason)
        # A cut shows at once as an abort; what the leader says later is in the outcome.
        if (str(reason) if finish == "abort" else finish) not in seen and not shown["stop_ids"]:
            self._journal.wrong(f"{record}: its client saw {seen}, its gateway tells {reason}")

    def _given(self, record: Record, shown: dict[str, Any], reason: Reason) -> bool:
        """Whether something in this run gives ``record`` that reason."""
        structured = prompts.PROMPTS[record.wanted.prompt].structured_outputs is not None
        if reason is Reason.LENGTH:
            return True
        if reason in (Reason.EOS, Reason.GRAMMAR_END):
            return structured
        if reason is Reason.PREEMPTED:
            return structured and POLICIES[self._world.plan.policy].ends_constrained
        if reason is Reason.CLIENT_DISCONNECT:
            return record.left
        if reason is Reason.RANK_LOST:
            return self._journal.first_fault < record.ended < self._journal.recovered + _SEEN_S
        if reason in _DEADLINES:
            return _DEADLINES[reason] in record.wanted.deadlines
        return any(_reaches(told, record, shown, reason) for told in self._journal.told)

    # --- stops -------------------------------------------------------------------------------

    async def _every_stop_is_resolved(self) -> None:
        """Those that were asked for, and those that gateways made for clients that left."""
        wanted: dict[tuple[int, str], str] = {}
        for issued in self._journal.issued:
            if self._world.alive(issued.life):
                wanted[issued.life.gateway, issued.stop_id] = issued.what
        for gateway in (0, 1):
            _, body = await self._world.get(gateway, "/v1/requests", limit=1000)
            stop_ids = [each for request in body["data"] for each in request["stop_ids"]]
            for stop_id in stop_ids:
                wanted.setdefault((gateway, stop_id), "a stop in a request's list")
        end = time.monotonic() + RESOLVED_S
        for (gateway, stop_id), what in wanted.items():
            await self._resolved(gateway, stop_id, what, end)
        self._journal.counts["stops resolved"] = len(wanted)

    async def _resolved(self, gateway: int, stop_id: str, what: str, end: float) -> None:
        last: dict[str, Any] = {}

        async def resolved() -> bool:
            nonlocal last
            status, last = await self._world.get(gateway, f"/v1/stops/{stop_id}")
            return status == 404 or last["status"] in _TERMINAL

        if not await until(resolved, max(0.5, end - time.monotonic())):
            self._journal.wrong(f"{what} ({stop_id}) is not resolved at gateway {gateway}: {last}")
        elif "status" not in last and what != "a stop in a request's list":
            self._journal.wrong(f"{what} ({stop_id}) is not known at gateway {gateway}")

    # --- the group ---------------------------------------------------------------------------

    async def _every_group_runs(self) -> None:
        """Whatever paused it, and whoever was killed meanwhile."""
        last: dict[str, Any] = {}

        async def runs(gateway: int) -> bool:
            nonlocal last
            _, last = await self._world.get(gateway, "/v1/groups")
            return [group["mode"] for group in last["groups"]] == ["running"]

        for gateway in (0, 1):  # the leader tells each of them
            if not await until(lambda gateway=gateway: runs(gateway), IDLE_S):
                self._journal.wrong(f"gateway {gateway} says of its group, resumed: {last}")

    async def _nothing_is_held(self) -> None:
        last: dict[str, Any] = {}

        async def idle() -> bool:
            nonlocal last
            last = await self._world.ledger()
            return "blocks" in last and not _busy(last)

        if not await until(idle, IDLE_S):
            self._journal.wrong(f"held {IDLE_S:g} s after the last client's end: {last}")
            return
        blocks = last["blocks"]
        if last["check"] != "ok" or blocks["free"] + blocks["cached"] != blocks["total"]:
            self._journal.wrong(f"the books do not balance: {last}")
        for gateway in (0, 1):
            if not await until(lambda gateway=gateway: self._metrics_idle(gateway), IDLE_S):
                self._journal.wrong(f"gateway {gateway} still counts something as running")

    async def _metrics_idle(self, gateway: int) -> bool:
        text = (await self._world.http[gateway].get("/metrics")).text
        names = r"stopway_requests_(?:running|waiting)|stopway_gateway_requests"
        gauges = re.findall(rf"^(?:{names})(?:\{{[^}}]*\}})? (\S+)", text, re.M)
        held = re.findall(r'^stopway_kv_blocks\{[^}]*state="held"[^}]*\} (\S+)', text, re.M)
        return bool(gauges) and bool(held) and not any(float(v) for v in (*gauges, *held))

    async def _serves_as_before(self) -> None:
        """The same text, and turns enough for the replicas to compare their digests."""
        before = after = await self._world.ledger()
        for gateway in (0, 1) * ROUNDS_MAX:
            asking = [ask(self._world, gateway, prompt) for prompt in range(len(self._known))]
            for known, (_, text) in zip(self._known, await asyncio.gather(*asking), strict=True):
                if text != known:
                    self._journal.wrong(f"after all that {text!r} comes for {known!r}")
                    return
            after = await self._world.ledger()
            if after.get("epoch") != before.get("epoch"):
                self._journal.wrong(f"an epoch ended in peace: {before}, then {after}")
                return
            if gateway and after["turn"] - before["turn"] >= DIGESTS:
                return
        self._journal.wrong(f"too few turns to compare digests: {before}, then {after}")

    def _memory_is_bounded(self) -> None:
        """Of all but the ranks, which have the weights."""
        pids = self._world.pids_but_ranks()
        for what, pid in pids.items():
            used_mib = psutil.Process(pid).memory_info().rss >> 20
            self._journal.counts[f"MiB of {what} at the end"] = used_mib
            if used_mib > MEMORY_MIB:
                self._journal.wrong(f"{what} has {used_mib} MiB")

    # --- logs --------------------------------------------------------------------------------

    def _logs_are_clean(self) -> None:
        logs = self._world.stack.logs_dir
        for path in sorted(path for pattern in _FILES for path in logs.glob(pattern)):
            text = path.read_text(errors="replace")
            for found in re.findall(r"^.*replicas differ.*$", text, re.M):
                self._journal.wrong(f"{path.name}: {found}")
            for trace in tracebacks(path):
                self._journal.wrong(f"{path.name}: {trace}")


def tracebacks(path: Path) -> list[str]:
    """The tracebacks in a log, except those of a rank whose peer has gone."""
    found = []
    lines = path.read_text(errors="replace").splitlines()
    for start, line in enumerate(lines):
        if not line.startswith("Traceback (most recent call last)"):
            continue
        end = start + 1
        while end < len(lines) and (lines[end].startswith((" ", "\t")) or not lines[end]):
            end += 1
        block = lines[start : end + 1]
        of_a_step = any("exec_thread.py" in each for each in block)
        if not (of_a_step and _PEER_GONE.search(block[-1])):
            found.append("\n".join(block))
    return found


async def ask(world: World, gateway: int, prompt: int) -> tuple[int, str]:
    """Status and greedy answer of a prompt, or what came instead; the status is 0 for nothing."""
    try:
        response = await world.http[gateway].post(
            "/v1/chat/completions",
            json=prompts.body(prompt, max_tokens=prompts.KNOWN_TOKENS),
            headers=world.headers(),
        )
    except httpx.TransportError as error:
        return 0, repr(error)
    if response.status_code != 200:
        return response.status_code, response.text
    return 200, str(response.json()["choices"][0]["message"]["content"])


def _busy(ledger: dict[str, Any]) -> bool:
    held = ledger["blocks"]["held"] or ledger["holders"] or ledger["in_flight"]
    return bool(held or ledger["running"] or ledger["waiting"] or ledger["requests"])


def _reaches(told: Told, record: Record, shown: dict[str, Any], reason: Reason) -> bool:
    if told.reason is not reason or told.by not in ("", record.wanted.tenant):
        return False
    if not record.began - _LATE_S <= told.at <= record.ended + _LATE_S:
        return False
    return (
        told.everything
        or shown["id"] in told.uids
        or (told.tenant != "" and told.tenant == record.wanted.tenant)
        or (told.conversation != "" and told.conversation == record.wanted.conversation)
    )
