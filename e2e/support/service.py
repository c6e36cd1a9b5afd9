"""A service as its users see it: the object, its API, and clients that remember what they saw."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from support.evidence import FAILED
from support.kubectl import Object, name_of, node_of
from support.progress import say, wait_for
from support.stack import Namespace

READY_S = 150  # images are there; torch and the model load in some ten seconds, on two cores
CAPITAL = "What is the capital of France?"
STORY = "Tell a very long story about a lighthouse."


@dataclass
class Streamed:
    """What came of one stream: exactly one of ``finish_reason`` and ``error``, or neither."""

    uid: str = ""
    chunks: int = 0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    broken: str = ""  # the connection ended without a word: what no client may ever see
    refused: int = 0
    started: threading.Event = field(default_factory=threading.Event)

    @property
    def ended_well(self) -> bool:
        """Whether the client was told how it ended."""
        return bool(self.refused) or (self.done and bool(self.finish_reason or self.error))

    @property
    def reason(self) -> str:
        if self.error is not None:
            return str(self.error.get("code"))
        return str(self.stop_reason or self.finish_reason)


class Stream(threading.Thread):
    """A client that reads one stream to its end."""

    def __init__(self, service: "Service", max_tokens: int, client: httpx.Client) -> None:
        super().__init__(daemon=True)
        self.seen = Streamed()
        self._service, self._tokens, self._client = service, max_tokens, client
        self._leaving = threading.Event()
        self.start()

    def run(self) -> None:
        seen = self.seen
        try:
            with self._client.stream(
                "POST", "/v1/chat/completions", json=self._service.body(STORY, self._tokens)
            ) as response:
                if response.status_code != 200:
                    seen.refused = response.status_code
                    seen.error = json.loads(response.read()).get("error")
                    return
                seen.uid = response.headers["x-request-id"]
                for line in response.iter_lines():
                    if self._leaving.is_set():
                        return
                    self._take(line)
        except httpx.HTTPError as error:
            seen.broken = repr(error)
        finally:
            seen.started.set()
            self._client.close()

    def _take(self, line: str) -> None:
        seen = self.seen
        if line == "data: [DONE]":
            seen.done = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            seen.error = event.get("error", seen.error)
            for choice in event.get("choices", ()):
                if choice["delta"].get("content"):
                    seen.text += choice["delta"]["content"]
                    seen.chunks += 1
                    if seen.chunks >= 2:
                        seen.started.set()
                if choice.get("finish_reason"):
                    assert seen.finish_reason is None, "two terminal events"
                    seen.finish_reason = choice["finish_reason"]
                    seen.stop_reason = choice.get("stop_reason")

    def running(self) -> "Stream":
        """Wait until text has come."""
        assert self.seen.started.wait(60), "no text within 60 s"
        assert not self.seen.broken and not self.seen.refused, self.seen
        return self

    def disconnect(self) -> None:
        """Go away in mid-stream, without a word."""
        self._leaving.set()
        self.join(30)
        assert not self.is_alive()

    def ended(self, seconds: float = 60) -> Streamed:
        """Wait for the end; the client must have been told how."""
        self.join(seconds)
        assert not self.is_alive(), f"the stream has not ended within {seconds} s"
        assert self.seen.ended_well, self.seen
        return self.seen


class Service:
    """One InferenceService and what its users do with it."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.namespace, self.name = namespace, name
        self.kubectl = namespace.kubectl
        self._key = ""

    # --- the object ----------------------------------------------------------------------

    def get(self) -> Object:
        return self.kubectl.get("inferenceservice", self.name)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.get().get("status") or {})

    def patch(self, spec: dict[str, Any]) -> None:
        self.kubectl(
            "patch", "inferenceservice", self.name, "--type=merge", "-p", json.dumps({"spec": spec})
        )

    def conditions(self) -> dict[str, dict[str, Any]]:
        """By type; none as long as they are not about the spec that is there now."""
        found = self.get()
        status = found.get("status") or {}
        if status.get("observedGeneration") != found["metadata"]["generation"]:
            return {}
        return {condition["type"]: condition for condition in status.get("conditions", ())}

    def is_ready(self) -> bool:
        """Whether enough groups serve: those of the spec before count, too."""
        return self.conditions().get("Ready", {}).get("status") == "True"

    def is_settled(self) -> bool:
        """Whether it serves as the spec wants it, and nothing of the spec before is left."""
        found = self.conditions()
        serves = found.get("Ready", {}).get("status") == "True"
        return serves and found["Progressing"]["reason"] == "Settled"

    def wait_ready(self) -> None:
        wait_for(f"{self.name} is Ready", self.is_ready, READY_S, every=1.0)

    def wait_settled(self, seconds: float = READY_S) -> None:
        """After a change of the spec, which is not yet in effect when it is Ready."""
        wait_for(f"{self.name} is as its spec wants it", self.is_settled, seconds, every=1.0)

    def epochs(self) -> dict[str, int]:
        """Epoch by group, of groups that are in one."""
        groups = self.status.get("groups", ())
        return {g["name"]: int(g.get("epoch") or 0) for g in groups if g["ready"]}

    def epoch(self, after: int = 0) -> int:
        """The epoch of its one group, once it is ready in one after that."""

        def found() -> int:
            (epoch,) = self.epochs().values()
            return epoch if epoch > after else 0

        return wait_for(f"its group is in an epoch after {after}", found, READY_S, every=1.0)

    def engine_pods(self) -> list[Object]:
        instance, component = "app.kubernetes.io/instance", "app.kubernetes.io/component"
        pods = self.kubectl.pods(f"{instance}={self.name},{component}=engine")
        return sorted(pods, key=name_of)

    def nodes(self) -> dict[str, str]:
        """Engine pod -> node."""
        return {name_of(pod): node_of(pod) for pod in self.engine_pods()}

    # --- the API -------------------------------------------------------------------------

    @property
    def key(self) -> str:
        if not self._key:
            secret = self.kubectl.get("secret", self.status["apiKeysSecret"])
            entries = base64.b64decode(next(iter(secret["data"].values()))).decode()
            self._key = entries.replace(";", ",").split(",")[0].split("=", 1)[-1].strip()
        return self._key

    def client(self, **options: Any) -> httpx.Client:
        return self.namespace.http(
            f"svc/{self.gateway}",
            8080,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=60,
            **options,
        )

    @property
    def gateway(self) -> str:
        return f"{self.name}-gateway"

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }

    def stream(self, max_tokens: int = 4000) -> Stream:
        return Stream(self, max_tokens, self.client())

    def capital(self) -> str:
        """The answer to the question that every deployment is asked first."""
        body = {**self.body(CAPITAL, 16), "stream": False, "ignore_eos": False}
        with self.client() as client:
            response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def answers(self) -> bool:
        try:
            return "Paris" in self.capital()
        except (AssertionError, httpx.HTTPError):
            return False

    def cancel(self, uid: str, wait: str = "reclaimed") -> dict[str, Any]:
        with self.client() as client:
            response = client.post(
                f"/v1/requests/{uid}/cancel", params={"wait": wait, "timeout": 30}
            )
        assert response.status_code == 200, response.text
        return dict(response.json())

    def stop(self, stop_id: str) -> dict[str, Any]:
        with self.client() as client:
            return dict(client.get(f"/v1/stops/{stop_id}").json())

    def request(self, uid: str) -> dict[str, Any]:
        with self.client() as client:
            return dict(client.get(f"/v1/requests/{uid}").json())

    def is_serving(self, mode: str) -> bool:
        """Whether the gateway is connected to an epoch of every group, and in ``mode``."""
        with self.client() as client:
            groups = client.get("/v1/groups").json()["groups"]
        return bool(groups) and all(g["epoch"] and g["mode"] == mode for g in groups)

    def say_mode(self, how: str, **body: str) -> None:
        """``pause``, ``resume`` or ``drain`` every group, and wait until it is so."""
        with self.client() as client:
            response = client.post(f"/v1/groups/{how}", json=body)
        assert response.status_code == 200, response.text

    def assert_idle(self) -> None:
        """Nothing is held by anybody, in any group."""

        def idle() -> bool:
            with self.client() as client:
                groups = client.get("/debug/ledger").json()["groups"]
            return bool(groups) and all(
                g.get("check") == "ok"
                and not g["blocks"]["held"]
                and not g["requests"]
                and g["blocks"]["free"] + g["blocks"]["cached"] == g["blocks"]["total"]
                for g in groups
            )

        wait_for("free + cached = total in every group", idle, 30)

    def kill_rank(self, pod: str) -> None:
        """SIGKILL to the first rank process of a pod."""
        self.kubectl.exec(
            pod,
            "python3",
            "-c",
            "import os,signal,glob\n"
            "for d in sorted(glob.glob('/proc/[0-9]*')):\n"
            "  try: line = open(d + '/cmdline').read()\n"
            "  except OSError: continue\n"
            "  if 'stopway_engine.rank' in line.split(chr(0)):\n"
            "    os.kill(int(d[6:]), signal.SIGKILL); break\n",
        )


def spec(**changes: Any) -> dict[str, Any]:
    """The spec of a service of two tensor-parallel ranks in two pods, on two nodes."""
    base: dict[str, Any] = {
        "model": {"uri": "builtin:smollm2", "name": "smollm2-135m-instruct"},
        "parallelism": {"tensor": 2, "pipeline": 1, "ranksPerPod": 1},
        "engine": {"threads": 1, "kvBlocks": 512, "peerLossSeconds": 4, "maxRunning": 16},
        "stop": {"drainSeconds": 15},
        "recovery": {"lostNodeSeconds": 15},
        "podTemplate": {"resources": {"requests": {"cpu": "50m", "memory": "512Mi"}}},
        "gateway": {"podTemplate": {"resources": {"requests": {"cpu": "20m", "memory": "64Mi"}}}},
    }
    return {**base, **changes}


def apply_service(namespace: Namespace, name: str, **changes: Any) -> Service:
    namespace.kubectl.apply(
        {
            "apiVersion": "serving.stopway.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": namespace.name},
            "spec": spec(**changes),
        }
    )
    return Service(namespace, name)


_spoiled: set[tuple[str, str]] = set()  # namespace and name of services that tests failed on


@contextmanager
def shared_service(
    namespace: Namespace, name: str, test: pytest.Item, **changes: Any
) -> Iterator[Service]:
    """A service of several tests, Ready. One that a test has failed on is made anew for the next.

    Applied for each of them: that changes nothing where it is there.
    """
    key = (namespace.name, name)
    if key in _spoiled:
        namespace.kubectl.delete("inferenceservice", name)
        wait_for(f"nothing is left of {name}", lambda: left_of(namespace) == [], 120, every=1.0)
    _spoiled.add(key)
    found = apply_service(namespace, name, **changes)
    found.wait_ready()
    yield found
    if not test.stash.get(FAILED, False):
        _spoiled.discard(key)


def left_of(namespace: Namespace) -> list[str]:
    """Objects of Stopway's that are in a namespace."""
    kinds = "statefulsets,deployments,services,secrets,networkpolicies,pdb,pods"
    found = namespace.kubectl(
        "get", kinds, "-l", "app.kubernetes.io/managed-by=stopway-operator", "-o", "name"
    )
    return found.split()


class Load:
    """Streams that start one after the other for as long as it lasts, and how each ended."""

    def __init__(self, service: Service, clients: int = 2, max_tokens: int = 40) -> None:
        self.ends: list[Streamed] = []
        self._stop = threading.Event()
        self._service, self._tokens = service, max_tokens
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
        say(f"{len(self.ends)} requests under load: {self.summary()}")

    def _run(self) -> None:
        while not self._stop.is_set():
            stream = self._service.stream(self._tokens)
            stream.join(90)
            self.ends.append(stream.seen)
            if stream.seen.refused:
                time.sleep(0.2)

    def summary(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for seen in self.ends:
            how = seen.broken or (f"refused {seen.refused}" if seen.refused else seen.reason)
            counts[how] = counts.get(how, 0) + 1
        return counts

    def assert_everybody_was_told(self) -> None:
        assert self.ends
        for seen in self.ends:
            assert seen.ended_well and not seen.broken, (seen, self.summary())
