"""What clients ask for, drawn from a seed. Each request's draw depends on (seed, number) only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

from stopway_core.types import Deadlines
from stopway_sim.fleet.errors import FleetError
from stopway_sim.fleet.limits import (
    CHOICES_MAX,
    COUNT_MAX,
    PRIORITY_MAX,
    SECONDS_MAX,
    is_duration,
)

FORMS = {  # of a distribution, and how its values are called
    "lognormal": ("MEDIAN", "SIGMA"),
    "uniform": ("LOW", "HIGH"),
    "constant": ("N",),
    "values": ("a value",),  # any number of them
}
SIGMA_MAX = 10.0  # its tail is far beyond any context, and far from a float's end
_INDEX_BITS = 6  # of a choice, below CHOICES_MAX
_DRAW, _TEXT, _PREFIX, _ARRIVAL, _PART = range(1, 6)


def stream(seed: int, kind: int, ident: int = 0) -> Random:
    """An independent random stream for each (seed, kind, ident)."""
    return Random((seed << 72) | (kind << 64) | ident)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of counts: how ``--prompt``, ``--output`` and ``--choices`` are written.

    ``lognormal:MEDIAN:SIGMA``, ``uniform:LOW:HIGH`` (both included), ``constant:N``, or
    ``values:A,B,C`` (each as likely).
    """

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read one. Raises ``FleetError`` that says how it is written."""
        kind, _, rest = text.partition(":")
        try:
            values = tuple(float(v) for v in rest.replace(",", ":").split(":"))
        except ValueError:
            values = ()
        names = FORMS.get(kind, ())
        if kind == "values":
            names *= len(values)
        good = values and len(values) == len(names)
        if not good or not all(0 <= v <= COUNT_MAX for v in values):
            raise FleetError(
                f"{text!r} is no distribution of counts; write lognormal:MEDIAN:SIGMA, "
                f"uniform:LOW:HIGH, constant:N or values:A,B,C, in numbers to {COUNT_MAX}"
            )
        if kind == "lognormal" and values[1] > SIGMA_MAX:
            raise FleetError(f"{text!r}: SIGMA is {values[1]:g}; give 0 to {SIGMA_MAX:g}")
        for name, value in zip(names, values, strict=True):
            if value < 1 and name != "SIGMA":
                raise FleetError(f"{text!r}: {name} is {value:g}; give 1 or more")
        if kind == "uniform" and values[0] > values[1]:
            raise FleetError(f"{text!r}: LOW is more than HIGH; give the lesser one first")
        return cls(kind, values)

    def draw(self, random: Random, limit: int) -> int:
        """A count from 1 to ``limit``."""
        values = self.values
        if self.kind == "lognormal":
            value = random.lognormvariate(math.log(values[0]), values[1])
        elif self.kind == "uniform":
            value = random.uniform(values[0], values[1] + 1)
        elif self.kind == "constant":
            value = values[0]
        else:
            value = random.choice(values)
        return max(1, min(limit, int(value)))


@dataclass(frozen=True, slots=True)
class Cancels:
    """Which requests their clients give up.

    A ``share`` of all, at an exponential time after arrival with mean ``after_s``; or, with
    ``after_tokens``, when an exponential number of tokens with that mean (at least 1) has come.
    ``disconnects`` of them just go away; the others call the gateway's cancel.
    """

    share: float = 0.0
    after_s: float = 2.0
    after_tokens: float | None = None
    disconnects: float = 0.5


@dataclass(frozen=True, slots=True)
class Storm:
    """At ``at_s`` a ``share`` of all requests alive is given up."""

    at_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Synthetic requests: an open loop (Poisson) or a closed one (``clients``).

    ``rate`` is of the whole fleet, per second. With ``clients`` the rate is not used: each client
    asks, waits for the end, thinks ``think_s`` and asks again; client c is bound to cell
    c modulo cells. A ``shared`` share begins with one of ``prefixes`` common texts of
    ``prefix_tokens``. A ``follow_ups`` share continues a conversation: its prompt is the earlier
    prompt, the whole (first) answer that it was to get, and new text.

    ``priorities`` are (priority, share); what is left of all has priority 0, a smaller one goes
    first, and a follow-up has that of its conversation. ``choices`` answers are asked for with
    each request, all of the same length.
    """

    requests: int = 1000
    rate: float = 20.0
    clients: int = 0
    think_s: float = 0.0
    prompt: Lengths = field(default_factory=lambda: Lengths("lognormal", (256, 0.8)))
    output: Lengths = field(default_factory=lambda: Lengths("lognormal", (128, 0.8)))
    shared: float = 0.0
    prefixes: int = 4
    prefix_tokens: int = 512
    follow_ups: float = 0.0
    cancels: Cancels = field(default_factory=Cancels)
    storms: tuple[Storm, ...] = ()
    deadlines: Deadlines = field(default_factory=Deadlines)
    priorities: tuple[tuple[int, float], ...] = ()
    choices: Lengths = field(default_factory=lambda: Lengths("constant", (1,)))

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= COUNT_MAX:
            raise FleetError(f"{self.requests} requests; give at least 1, at most {COUNT_MAX}")
        if self.clients < 0 or not is_duration(self.think_s):
            raise FleetError(f"clients are 0 or more, and think 0 to {SECONDS_MAX:g} s")
        if not self.clients and not 1 / SECONDS_MAX <= self.rate < math.inf:
            raise FleetError(f"a rate of {self.rate} requests a second; give more than 0")
        cancels = self.cancels
        shares = {
            "shared prefixes": self.shared,
            "follow-ups": self.follow_ups,
            "cancelled requests": cancels.share,
            "disconnects": cancels.disconnects,
            **{f"a storm at {storm.at_s:g} s": storm.share for storm in self.storms},
            **{f"priority {priority}": share for priority, share in self.priorities},
        }
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise FleetError(f"the share of {name} is {share}; give 0 to 1")
        tokens = 1.0 if cancels.after_tokens is None else cancels.after_tokens
        if not is_duration(cancels.after_s) or not 0 < tokens <= COUNT_MAX:
            raise FleetError("cancels come 0 s or later after arrival, or after more than 0 tokens")
        if not all(is_duration(storm.at_s) for storm in self.storms):
            raise FleetError("a storm comes 0 s or later after the start")
        for name in ("queue", "first_token", "total"):
            seconds = getattr(self.deadlines, name)
            if seconds is not None and not is_duration(seconds):
                raise FleetError(f"deadlines are 0 seconds or more, not {seconds}")
        if self.shared and (self.prefixes < 1 or self.prefix_tokens < 1):
            raise FleetError("shared prefixes need at least 1 prefix of at least 1 token")
        self._check_priorities()
        if self.choices.kind != "lognormal" and max(self.choices.values) > CHOICES_MAX:
            raise FleetError(f"a request has 1 to {CHOICES_MAX} choices")

    @property
    def one_choice(self) -> bool:
        """Whether every request asks for one answer."""
        return self.choices.kind != "lognormal" and max(self.choices.values) <= 1

    def _check_priorities(self) -> None:
        found = [priority for priority, _ in self.priorities]
        for priority in found:
            if abs(priority) > PRIORITY_MAX:
                raise FleetError(
                    f"priority {priority}: give a whole number from -{PRIORITY_MAX} to "
                    f"{PRIORITY_MAX}"
                )
        if len(set(found)) < len(found):
            raise FleetError("a priority is given twice; give each with one share")
        if math.fsum(share for _, share in self.priorities) > 1 + 1e-9:
            raise FleetError("the shares of priorities are more than 1 together")


@dataclass(frozen=True, slots=True)
class Spec:
    """One request as its client means it. Times in seconds from the start of the run.

    ``output`` is of each of its ``choices``; ``cancel_after_tokens`` are of all together.
    """

    number: int
    arrival_s: float
    own: int  # new prompt tokens
    output: int
    prefix: int = -1  # which common text comes first
    prefix_tokens: int = 0
    history: tuple[tuple[int, int, int], ...] = ()  # (number, own, output) of earlier turns
    conversation: int = -1
    cancel_after_s: float | None = None
    cancel_after_tokens: int | None = None
    disconnect: bool = False
    priority: int = 0
    choices: int = 1
    client: int = -1  # of a closed loop

    @property
    def prompt_len(self) -> int:
        """Tokens of the whole prompt."""
        return self.prefix_tokens + self.own + sum(own + out for _, own, out in self.history)

    @property
    def parent(self) -> int:
        """The number of the turn before it in its conversation, or -1."""
        return self.history[-1][0] if self.history else -1


class Drawer:
    """Draws requests. ``limit`` is the longest prompt and answer together, in tokens."""

    def __init__(self, workload: Workload, seed: int, limit: int) -> None:
        self.workload = workload
        self.seed = seed
        self.limit = limit

    def draw(
        self, number: int, arrival_s: float, earlier: Spec | None = None, client: int = -1
    ) -> Spec:
        """Request ``number``; a follow-up of ``earlier`` when that leaves it room."""
        work, random = self.workload, stream(self.seed, _DRAW, number)
        prefix = random.randrange(work.prefixes) if random.random() < work.shared else -1
        prefix_tokens = min(work.prefix_tokens, self.limit // 2) if prefix >= 0 else 0
        room = self.limit - prefix_tokens
        own, output = work.prompt.draw(random, room - 1), work.output.draw(random, room - 1)
        history: tuple[tuple[int, int, int], ...] = ()
        conversation = number if work.follow_ups else -1
        if earlier is not None:
            past = earlier.prompt_len + earlier.output
            if past + own + output <= self.limit:
                history = (*earlier.history, (earlier.number, earlier.own, earlier.output))
                prefix, prefix_tokens = earlier.prefix, earlier.prefix_tokens
                conversation = earlier.conversation
        own = min(own, max(1, room - output)) if not history else own
        after_s, after_tokens = self._cancel(random)
        disconnect = random.random() < work.cancels.disconnects
        # Drawn last: with other priorities or choices, all else of a workload is the same.
        priority, choices = self._priority(random.random()), work.choices.draw(random, CHOICES_MAX)
        return Spec(
            number=number,
            arrival_s=arrival_s,
            own=own,
            output=output,
            prefix=prefix,
            prefix_tokens=prefix_tokens,
            history=history,
            conversation=conversation,
            cancel_after_s=after_s,
            cancel_after_tokens=after_tokens,
            disconnect=disconnect,
            priority=earlier.priority if earlier is not None and history else priority,
            choices=choices,
            client=client,
        )

    def follows(self, number: int) -> float | None:
        """None, or for a follow-up a number from 0 to 1 that chooses the conversation."""
        random = stream(self.seed, _PART, number)
        return random.random() if random.random() < self.workload.follow_ups else None

    def _priority(self, drawn: float) -> int:
        """Whose share ``drawn`` (0 to 1) is in."""
        for priority, share in self.workload.priorities:
            drawn -= share
            if drawn < 0:
                return priority
        return 0

    def _cancel(self, random: Random) -> tuple[float | None, int | None]:
        cancels = self.workload.cancels
        if random.random() >= cancels.share:
            return None, None
        if cancels.after_tokens is not None:
            return None, max(1, round(random.expovariate(1 / cancels.after_tokens)))
        return (random.expovariate(1 / cancels.after_s) if cancels.after_s else 0.0), None


_RECENT = 512  # conversations that a follow-up may continue


def open_loop(drawer: Drawer) -> list[Spec]:
    """All requests of an open loop, by arrival.

    A follow-up continues one of the latest conversations, whether or not its last turn has ended.
    """
    workload = drawer.workload
    arrivals = stream(drawer.seed, _ARRIVAL)
    now = 0.0
    recent: list[Spec] = []
    specs: list[Spec] = []
    for number in range(workload.requests):
        now += arrivals.expovariate(workload.rate)
        chosen = drawer.follows(number) if recent else None
        slot = None if chosen is None else int(chosen * len(recent))
        spec = drawer.draw(number, now, None if slot is None else recent[slot])
        if workload.follow_ups:
            if spec.history and slot is not None:
                recent[slot] = spec
            else:
                recent.append(spec)
                del recent[:-_RECENT]
        specs.append(spec)
    return specs


class Texts:
    """Token ids of prompts and answers; a token is a byte, drawn from (seed, request, position)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._prefixes: dict[int, bytes] = {}

    def request_seed(self, number: int) -> int:
        """The seed of a request's sampling parameters: unique, and says its number.

        The planner adds the index of each choice, of which this leaves room for ``CHOICES_MAX``.
        """
        return ((self.seed & 0x3FFF_FFFF) << 32) | (number << _INDEX_BITS)

    def prompt(self, spec: Spec) -> tuple[int, ...]:
        """All the tokens of a prompt."""
        text = bytearray(self._prefix(spec))
        for number, own, output in spec.history:
            text += self._own(number, own)
            seed, start = self.request_seed(number), len(text)
            text += bytes(token_at(seed, p) for p in range(start, start + output))
        text += self._own(spec.number, spec.own)
        return tuple(text)

    def _own(self, number: int, count: int) -> bytes:
        return stream(self.seed, _TEXT, number).randbytes(count)

    def _prefix(self, spec: Spec) -> bytes:
        if spec.prefix < 0:
            return b""
        found = self._prefixes.get(spec.prefix)
        if found is None or len(found) < spec.prefix_tokens:
            found = stream(self.seed, _PREFIX, spec.prefix).randbytes(spec.prefix_tokens)
            self._prefixes[spec.prefix] = found
        return found[: spec.prefix_tokens]


def choice_of(request_seed: int) -> tuple[int, int]:
    """(number of the request, index of the choice) that has this sampling seed."""
    return (request_seed & 0xFFFF_FFFF) >> _INDEX_BITS, request_seed & (1 << _INDEX_BITS) - 1


def token_at(request_seed: int, position: int) -> int:
    """The token that is sampled at a position; the same after a preemption."""
    return hash((request_seed, position)) & 0xFF
