"""What happens in one run, drawn from its seed: the stack's shape, the load, the faults.

Pure: the same seed and seconds make the same plan. What the plan meets depends on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random

PEER_LOSS_S = 3.0
FIRST_FAULT_S = 3.0
CLIENTS = 10
SENDERS = 2  # of signals
MAX_MODEL_LEN = 2048
KV_BLOCKS = 160  # of 16 tokens: too few for all clients at once, so that some are preempted
ENDLESS = 1500  # tokens; only a stop, a deadline or a fault ends such a request in time
CONVERSATIONS = ("c0", "c1", "c2")
ADMIN = "default"
TENANTS = (ADMIN, "guest")

# These end the epoch (or the front, or a gateway): then something must come back.
HEAVY = (
    "rank_killed",
    "leader_killed",
    "rank_frozen_long",
    "front_killed",
    "children_killed",
    "pod_killed",
    "pod_drained",
)
LIGHT = (
    "rank_frozen_short",
    "pod_frozen",
    "gateway_frozen",
    "redis_killed",
    "redis_frozen",
    "redis_flushed",
    "streams_trimmed",
    "gateway_killed",
)
MODES = ("wait", "keep", "abort")
SIGNALS = (
    *("conversation", "tenant", "all", "duplicate", "reorder", "late", "skewed", "early"),
    "mode",
)
_SIGNAL_WEIGHTS = (8, 2, 1, 4, 4, 4, 8, 8, 8)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``seconds`` is how long a freeze lasts, ``pick`` in [0, 1) chooses its victim."""

    at_s: float
    kind: str
    seconds: float
    pick: float

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at_s:6.1f} s  {self.kind}{lasts}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request and what its client does with it.

    ``then`` is ``read`` (to the end), ``cancel`` or ``leave``, after ``chunks`` chunks of text of
    a stream, or ``after_s`` seconds when it is not streamed.
    """

    prompt: int
    gateway: int
    tenant: str
    stream: bool
    n: int
    priority: int
    max_tokens: int
    conversation: str
    deadlines: dict[str, float]
    then: str
    chunks: int
    after_s: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class Signal:
    """One stop that no client of a request sends, or a disturbance of the stops' streams.

    ``mode`` is what the group is paused with for ``paused_s``.
    """

    kind: str
    gateway: int
    conversation: str
    tenant: str
    wait: str
    skew_s: float  # of ``issued_at``
    shuffle: int
    mode: str
    paused_s: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seed: int
    seconds: float
    tensor: int
    pipeline: int
    ranks_per_pod: int
    draft_tokens: int
    policy: str
    faults: tuple[Fault, ...] = field(repr=False)

    def wanted(self, client: int, turn: int, prompts: int) -> Wanted:
        """What ``client`` asks for as its request number ``turn``."""
        return _wanted(Random(f"{self.seed}/client/{client}/{turn}"), prompts)

    def signal(self, sender: int, turn: int) -> Signal:
        """The stop or disturbance that ``sender`` sends as its number ``turn``."""
        rng = Random(f"{self.seed}/signal/{sender}/{turn}")
        return Signal(
            kind=rng.choices(SIGNALS, _SIGNAL_WEIGHTS)[0],
            gateway=rng.randrange(2),
            conversation=rng.choice(CONVERSATIONS),
            tenant=rng.choice(TENANTS),
            wait=rng.choice(("accepted", "stopped", "reclaimed")),
            skew_s=rng.choice((-1.0, 1.0)),
            shuffle=rng.randrange(1 << 30),
            mode=rng.choice(MODES),
            paused_s=rng.uniform(0.2, 3.0),
            pause_s=rng.uniform(1.0, 4.0),
        )

    def __str__(self) -> str:
        shape = f"tensor {self.tensor}, pipeline {self.pipeline}, {self.ranks_per_pod} per pod"
        group = f"{shape}, {self.draft_tokens} draft tokens, policy {self.policy}"
        lines = [f"chaos, seed {self.seed}: {self.seconds:g} s, {group}"]
        return "\n".join(lines + [f"  {fault}" for fault in self.faults])


def draw(seed: int, seconds: float, policy: str = "native") -> Plan:
    """The plan of a seed; the policy is not drawn."""
    rng = Random(seed)
    tensor, pipeline = rng.choice(((2, 1), (1, 2)))
    return Plan(
        seed=seed,
        seconds=seconds,
        tensor=tensor,
        pipeline=pipeline,
        ranks_per_pod=rng.choice((1, 2)),
        draft_tokens=rng.choice((0, 4)),
        policy=policy,
        faults=tuple(_faults(rng, seconds)),
    )


def _faults(rng: Random, seconds: float) -> list[Fault]:
    """Light ones every few seconds, heavy ones when the last was survived, or just before."""
    found = []
    for kinds, gap in ((HEAVY, _heavy_gap), (LIGHT, _light_gap)):
        deck: list[str] = []
        at_s = FIRST_FAULT_S + rng.uniform(0, 2)
        for _ in count():
            if at_s >= seconds:
                break
            if not deck:  # every kind once before any comes again
                deck = rng.sample(kinds, len(kinds))
            kind = deck.pop()
            found.append(Fault(at_s, kind, _lasts(rng, kind), rng.random()))
            at_s += gap(rng)
    return sorted(found, key=lambda fault: fault.at_s)


def _heavy_gap(rng: Random) -> float:
    """A new epoch takes some ten seconds; a quarter of the faults comes while it forms."""
    return rng.uniform(0.0, 5.0) if rng.random() < 0.25 else rng.uniform(15.0, 22.0)


def _light_gap(rng: Random) -> float:
    return rng.uniform(0.0, 0.5) if rng.random() < 0.25 else rng.uniform(2.0, 7.0)


def _lasts(rng: Random, kind: str) -> float:
    if kind == "rank_frozen_long":
        return PEER_LOSS_S + rng.uniform(1.0, 4.0)
    if kind == "rank_frozen_short":
        return rng.uniform(0.2, PEER_LOSS_S / 2)
    if kind in ("redis_frozen", "pod_frozen", "gateway_frozen"):
        return rng.uniform(0.5, 5.0)
    return 0.0


def _wanted(rng: Random, prompts: int) -> Wanted:
    stream = rng.random() < 0.75
    then = rng.choices(("read", "cancel", "leave"), (4, 3, 3))[0]
    endless = then != "read" and rng.random() < 0.5
    deadlines = {}
    if rng.random() < 0.2:
        name = rng.choice(("queue", "first_token", "total"))
        deadlines[name] = round(rng.choice((0.05, 0.5, 3.0)), 2)
    tenant = rng.choice(TENANTS)
    return Wanted(
        prompt=rng.randrange(prompts),
        gateway=rng.randrange(2),
        tenant=tenant,
        stream=stream,
        n=rng.choice((1, 1, 1, 1, 2, 4)),
        # Only an admin goes before the others.
        priority=rng.choice((0, 0, 0, 5, -5 if tenant == ADMIN else 1)),
        max_tokens=ENDLESS if endless else rng.choice((4, 12, 32, 64, 64)),
        conversation=rng.choice((*CONVERSATIONS, "", "")),
        deadlines=deadlines,
        then=then,
        chunks=rng.choice((0, 1, 4, 12)),
        after_s=rng.uniform(0.05, 3.0),
        pause_s=rng.uniform(0.0, 0.5),
    )
