"""Stops of every kind at random moments, by every way in, on two tensor-parallel ranks."""

import asyncio
import json
import random
import secrets
import time
from collections import Counter
from typing import Any

import pytest
import redis.asyncio as redis
import websockets

from stopway_core import names, signing
from stopway_core.types import Reason, Stop, Target

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

STOPS = 200
SEED = 20261130


STACK = {"tensor": 2, "max_running": 16}


def words(rng: random.Random, count: int) -> list[dict[str, str]]:
    text = " ".join(rng.choice(("sea", "ship", "storm", "light", "sailor")) for _ in range(count))
    return [{"role": "user", "content": f"Go on for very long: {text}"}]


def stop_of(uid: str, publisher: str) -> Stop:
    """A cancel of ``uid`` as another gateway makes it."""
    return Stop(
        stop_id=f"stop-{secrets.token_hex(6)}",
        target=Target(uids=(uid,)),
        reason=Reason.CLIENT_CANCEL,
        tenant="default",
        admin=False,
        issued_at=time.time(),
        publisher=publisher,
    )


class Disturber:
    """One request and one stop of it, both drawn from a seed."""

    def __init__(self, api: Any, seed: int) -> None:
        self.api = api
        self.rng = random.Random(seed)
        self.how = self.rng.choice(("api", "disconnect", "deadline", "before", "after", "many"))

    async def run(self) -> str:
        await asyncio.sleep(self.rng.random() * 0.3)
        ways = {
            "api": lambda: self.stream(leave=False),
            "disconnect": lambda: self.stream(leave=True),
            "deadline": self.deadline,
            "before": self.before,
            "after": self.after,
            "many": self.many,
        }
        return await ways[self.how]()

    def body(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens, "ignore_eos": True, "n": self.rng.choice((1, 1, 1, 2))}

    def prompt(self) -> list[dict[str, str]]:
        return words(self.rng, self.rng.choice((3, 40, 300)))

    async def cancel(self, uid: str) -> dict[str, Any]:
        receipt = await self.api.cancel(uid, timeout=30)
        assert receipt["status"] in ("reclaimed", "already_finished"), receipt
        return receipt

    async def stream(self, leave: bool) -> str:
        """Stop a stream at a random moment, through the API or by going away."""
        async with self.api.stream(self.prompt(), **self.body(400)) as stream:
            await stream.read(self.rng.choice((0, 0, 1, 5, 20)))
            if leave:
                return "client_disconnect"
            receipt = await self.cancel(stream.uid)
            await asyncio.wait_for(stream.read(), 30)
        assert stream.done and stream.finish_reason == "abort", stream
        assert receipt["outcome"] in ("stopped", {"finished": 0, "stopped": 2, "failed": 0})
        return stream.stop_reason

    async def many(self) -> str:
        """Several stops of one request at once, each of which succeeds."""
        async with self.api.stream(self.prompt(), **self.body(400)) as stream:
            await stream.read(self.rng.choice((0, 3)))
            receipts = await asyncio.gather(*[self.cancel(stream.uid) for _ in range(3)])
            await asyncio.wait_for(stream.read(), 30)
        assert sum(receipt["status"] == "reclaimed" for receipt in receipts) >= 1
        return stream.stop_reason

    async def deadline(self) -> str:
        total = self.rng.choice((0.01, 0.2, 0.6))
        response = await self.api.http.post(
            "/v1/chat/completions",
            json={
                **self.api.body,
                "messages": self.prompt(),
                **self.body(5000),
                "deadlines": {"total": total},
            },
        )
        assert response.status_code == 504, response.text
        assert response.json()["error"]["code"] == "deadline_total", response.text
        return "deadline_total"

    async def after(self) -> str:
        answer = await self.api.chat(self.prompt(), max_tokens=2)
        receipt = await self.cancel(answer["id"])
        assert receipt["status"] == "already_finished", receipt
        assert receipt["outcome"] == "finished"
        return "finished"

    async def before(self) -> str:
        """A gateway's own protocol: the stop comes first, its request later."""
        gateway = f"g{secrets.token_hex(4)}"
        uid = f"req-1-{gateway}-{secrets.token_hex(4)}"
        secret = self.api.stack.secret
        (front,) = self.api.stack.front_urls.values()
        stop = stop_of(uid, gateway)
        async with websockets.connect(
            front.replace("http", "ws") + f"/internal/v1/session?gateway={gateway}",
            additional_headers={"Authorization": f"Bearer {secret}"},
            proxy=None,
        ) as socket:
            hello = json.loads(await asyncio.wait_for(socket.recv(), 30))
            await socket.send(json.dumps({"type": "stop", "stop": signing.sign(stop, secret)}))
            while True:  # until a turn has it
                message = json.loads(await asyncio.wait_for(socket.recv(), 30))
                if (message.get("receipt") or {}).get("stop_id") == stop.stop_id:
                    break
            submit = {
                "type": "submit",
                "uid": uid,
                "attempt": 1,
                "epoch": hello["epoch"],
                "tenant": "default",
                "n": 1,
                "prompt": {"messages": self.prompt()},
                "params": {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0},
                "minted_at": time.time(),
            }
            await socket.send(json.dumps(submit))
            ended = None
            while True:
                message = json.loads(await asyncio.wait_for(socket.recv(), 30))
                assert message["type"] != "out", "a token of a request that was stopped before"
                if message["type"] == "end" and message["uid"] == uid:
                    ended = message
                receipt = message.get("receipt") or {}
                mine = receipt.get("stop_id") == stop.stop_id and receipt["outcome"]["stopped"]
                if ended and mine and receipt["status"] == "reclaimed":
                    break
        assert ended["outcome"] == "stopped" and ended["completion_tokens"] == 0
        return str(ended["reason"])


async def test_random_stops_leave_nothing_held(api: Any) -> None:
    """Two hundred stops, twelve requests at a time, and then nothing is held."""
    limit = asyncio.Semaphore(12)
    seen: Counter[tuple[str, str]] = Counter()

    async def one(index: int) -> None:
        async with limit:
            disturber = Disturber(api, SEED + index)
            seen[disturber.how, await disturber.run()] += 1

    async with asyncio.TaskGroup() as group:
        for index in range(STOPS):
            group.create_task(one(index))
    assert sum(seen.values()) == STOPS
    assert set(seen) == {
        ("api", "client_cancel"),
        ("many", "client_cancel"),
        ("disconnect", "client_disconnect"),
        ("deadline", "deadline_total"),
        ("before", "client_cancel"),
        ("after", "finished"),
    }, seen
    await api.assert_idle()
    assert "Paris" in await api.text(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    await api.assert_idle()


async def test_a_disconnect_is_found_through_its_request(api: Any, eventually: Any) -> None:
    async with api.stream(max_tokens=2000, ignore_eos=True) as stream:
        await stream.read(3)

    async def reclaimed() -> bool:
        request = await api.get(f"/v1/requests/{stream.uid}")
        if not request["stop_ids"]:
            return False
        receipt = await api.get(f"/v1/stops/{request['stop_ids'][0]}")
        return receipt["reason"] == "client_disconnect" and receipt["status"] == "reclaimed"

    await eventually(reclaimed, 30.0, "the disconnect's receipt")
    await api.assert_idle()


async def test_case_e19_a_stop_before_the_first_token_completes_its_spans(api: Any) -> None:
    long = [{"role": "user", "content": " ".join(f"word{i}" for i in range(900))}]
    async with api.stream(long, max_tokens=100) as stream:
        receipt = await api.cancel(stream.uid)
        await stream.read()
    assert stream.chunks == 0 and stream.finish_reason == "abort"
    wanted = {"request.queue", "stop.handoff"}
    spans = await api.spans(receipt["trace_id"], wanted, 3)
    assert not any(span.name == "request.decode" for span in spans)
    assert all(span.end >= span.start for span in spans)
    await api.assert_idle()


async def test_case_t06_the_context_crosses_redis(api: Any, eventually: Any) -> None:
    """The entry in the stream carries the trace that the ranks' spans are in."""
    await eventually(lambda: uses_redis(api), 30.0, "stops go by Redis")
    async with api.stream(max_tokens=2000, ignore_eos=True) as stream:
        await stream.read(2)
        receipt = await api.cancel(stream.uid)
    client = redis.Redis.from_url(api.stack.redis_url, decode_responses=True)
    mine: list[dict[str, Any]] = []

    async def written() -> bool:
        (group,) = api.stack.groups
        entries = await client.xrange(names.stops_stream("local", group.name))
        stops = [json.loads(fields["stop"]) for _, fields in entries]
        mine[:] = [stop for stop in stops if stop["stop_id"] == receipt["stop_id"]]
        return bool(mine)

    try:
        # A stop that took long on its way was sent past Redis, too.
        await eventually(written, 30.0, "the stop is in the stream")
    finally:
        await client.aclose()
    (entry,) = mine
    context = names.parse_traceparent(entry["traceparent"])
    assert context is not None and context[0] == receipt["trace_id"]


async def uses_redis(api: Any) -> bool:
    """Whether the gateway writes its stops to Redis now."""
    return "\nstopway_stop_bus_up 1.0\n" in (await api.http.get("/metrics")).text


async def test_what_is_no_stop_in_the_stream_ends_no_reader(api: Any) -> None:
    """After bytes that are not even UTF-8, a stop that comes by Redis alone still comes."""
    client = redis.Redis.from_url(api.stack.redis_url)
    (group,) = api.stack.groups
    try:
        # One is read by the group's pods, the other by the gateways.
        for entries in (
            names.stops_stream("local", group.name),
            names.gateway_stops_stream("local"),
        ):
            for junk in (b"\xff\xfe\x80", b"{", b"[]", b'{"stop_id": 1}', b"null"):
                await client.xadd(entries, {b"stop": junk})
            await client.xadd(entries, {b"\xff": b"\xff"})
            for _ in range(2):
                async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
                    await stream.read(2)
                    stop = signing.sign(stop_of(stream.uid, "other"), api.stack.secret)
                    await client.xadd(entries, {"stop": json.dumps(stop)})
                    await asyncio.wait_for(stream.read(), 60)
                assert stream.stop_reason == "client_cancel", (entries, stream)
    finally:
        await client.aclose()
    await api.assert_idle()


async def test_a_stop_string_ends_the_request_and_its_text(api: Any) -> None:
    whole = await api.text([{"role": "user", "content": "Count from 1 to 9."}], max_tokens=40)
    assert len(whole) > 6
    stop = whole[3:6]
    answer = await api.chat(
        [{"role": "user", "content": "Count from 1 to 9."}], max_tokens=40, stop=[stop]
    )
    assert answer["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    await api.assert_idle()


async def test_conversation_and_tenant_selectors_reach_their_own(api: Any) -> None:
    async with (
        api.stream(max_tokens=2000, ignore_eos=True, metadata={"conversation_id": "a"}) as one,
        api.stream(max_tokens=2000, ignore_eos=True, metadata={"conversation_id": "b"}) as two,
    ):
        await one.read(2)
        await two.read(2)
        response = await api.http.post("/v1/stops", json={"conversation": "a", "wait": "reclaimed"})
        assert response.status_code == 200, response.text
        assert response.json()["count"] == 1
        await one.read()
        assert one.finish_reason == "abort"
        await two.read(2)
        assert two.finish_reason is None
        response = await api.http.post("/v1/stops", json={"all": True, "wait": "reclaimed"})
        assert response.json()["reason"] == "admin"
        await two.read()
    assert two.stop_reason == "admin"
    await api.assert_idle()


async def full(api: Any, eventually: Any) -> None:
    """Wait until the group runs as many as it may."""

    async def runs_all() -> bool:
        return (await api.blocks())["running"] == STACK["max_running"]

    await eventually(runs_all, 60.0, "the group is full")


async def test_case_t01_a_stop_in_every_phase_is_in_its_trace_once(
    api: Any, eventually: Any
) -> None:
    """Queued behind a full group, in its prefill, and while it decodes."""
    long = words(random.Random(1), 5000)  # many steps, however fast the machine is
    async with asyncio.TaskGroup() as group:
        fillers = [group.create_task(fill(api)) for _ in range(16)]
        await full(api, eventually)

        async def one_waits() -> bool:
            return (await api.blocks())["waiting"] == 1

        async with api.stream(max_tokens=50) as queued:
            await eventually(one_waits, 60.0, "one waits")
            receipts = {"queued": await api.cancel(queued.uid)}
            await queued.read()
        response = await api.http.post("/v1/stops", json={"all": True, "wait": "reclaimed"})
        assert response.status_code == 200, response.text
    assert all(filler.result() == "admin" for filler in fillers)
    await api.assert_idle()  # so that what runs then is the next one

    async def one_runs() -> bool:
        return (await api.blocks())["running"] == 1

    async with api.stream(long, max_tokens=50) as prefilling:
        await eventually(one_runs, 60.0, "one runs")
        receipts["prefilling"] = await api.cancel(prefilling.uid)
        await prefilling.read()
    assert prefilling.chunks == 0
    async with api.stream(max_tokens=2000, ignore_eos=True) as decoding:
        await decoding.read(3)
        receipts["decoding"] = await api.cancel(decoding.uid)
        await decoding.read()
    phases = {f"stop.{phase}" for phase in ("notice", "in_flight", "reclaim", "handoff")}
    reached = {"queued": set(), "prefilling": {"request.prefill"}, "decoding": {"request.decode"}}
    for where, receipt in receipts.items():
        assert receipt["status"] == "reclaimed" and receipt["outcome"] == "stopped", receipt
        wanted = phases | {"request.queue"} | reached[where]
        spans = await api.spans(
            receipt["trace_id"], wanted, 2 * len(phases) + 1 + len(reached[where])
        )
        counts = Counter((s.name, s.attributes.get("stopway.rank")) for s in spans)
        for phase in phases:
            assert [counts[phase, rank] for rank in (0, 1)] == [1, 1], (where, counts)
        seen = {s.name for s in spans if s.name.startswith("request.")}
        assert seen >= {"request.queue"} | reached[where], (where, seen)
        if where == "queued":
            assert seen == {"request.queue"}
            assert receipt["groups"][0]["blocks_reclaimed"] == 0
    await api.assert_idle()


async def fill(api: Any) -> str:
    async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
        await stream.read()
    return stream.stop_reason


async def test_deadlines_have_their_statuses(api: Any, eventually: Any) -> None:
    body = {**api.body, "messages": words(random.Random(2), 1500), "ignore_eos": True}
    response = await api.http.post(
        "/v1/chat/completions", json={**body, "deadlines": {"first_token": 0.05}}
    )
    assert response.status_code == 504, response.text
    assert response.json()["error"]["code"] == "deadline_ttft"
    async with asyncio.TaskGroup() as group:
        fillers = [group.create_task(fill(api)) for _ in range(16)]
        await full(api, eventually)
        response = await api.http.post(
            "/v1/chat/completions", json={**body, "deadlines": {"queue": 0.1}}
        )
        assert response.status_code == 429, response.text
        assert int(response.headers["retry-after"]) > 0
        await api.http.post("/v1/stops", json={"all": True, "wait": "reclaimed"})
    assert all(filler.result() == "admin" for filler in fillers)
    await api.assert_idle()


async def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(api: Any) -> None:
    body = {**api.body, "messages": words(random.Random(3), 9000)}
    response = await api.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"] and "tokens" in error["message"]
    await api.assert_idle()
