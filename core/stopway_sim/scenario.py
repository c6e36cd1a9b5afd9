"""What a world is made of, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass

from stopway_core.planner import PlannerConfig
from stopway_core.types import Deadlines, Reason, SamplingParams, Stop, Submission, Target
from stopway_sim.choices import Chooser
from stopway_sim.group import GroupShape

START_S = 1_000_000.0  # Unix time at which simulated time begins
MS = 1_000  # microseconds

TENANTS = ("acme", "zeta")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes and fault rates of one world. Times in microseconds, rates in percent."""

    shape: GroupShape
    window: int
    batch_tokens: int
    max_running: int
    requests: int
    span_us: int  # arrivals and stops fall into it
    step_us_max: int
    link_us_max: int
    bus_drop: int
    bus_duplicate: int
    bus_us_max: int
    post_drop: int
    stop_rate: int
    deadline_rate: int
    disconnects: int
    deaths: int
    loads: int
    load_blocks: int
    drain: bool

    @property
    def positions(self) -> int:
        """Tokens that one request may have beside the off-queue writers' blocks."""
        return (self.shape.blocks - self.load_blocks) * self.shape.block_size

    def planner_config(self) -> PlannerConfig:
        """The bounds of the planner; token 0 is the end of sequence."""
        return PlannerConfig(
            max_model_len=self.positions,
            eos_ids=frozenset({0}),
            max_running=self.max_running,
            max_waiting=64,
            max_batch_tokens=self.batch_tokens,
            window=self.window,
        )


def draw(chooser: Chooser) -> Scenario:
    """A random world, small enough that things collide in it."""
    pick, chance = chooser.pick, chooser.chance
    faulty = chance(80)
    loads = pick((0, 0, 3))
    size = pick((2, 4, 4, 8))
    shape = GroupShape(
        tensor=pick((1, 1, 2)),
        pipeline=pick((1, 2, 2, 3)),
        blocks=pick((8, 12, 20, 40)),
        block_size=size,
        vocab=pick((12, 40)),
        prefix_cache=chance(85),
    )
    return Scenario(
        shape=shape,
        window=pick((1, 2, 3)),
        batch_tokens=pick((4, 8, 16, 64)),
        max_running=pick((2, 4, 8, 16)),
        requests=chooser.between(2, 14),
        span_us=pick((10, 40, 120)) * MS,
        step_us_max=pick((200, 1000, 5000)),
        link_us_max=pick((50, 500, 3000)),
        bus_drop=pick((0, 20, 60, 100)) if faulty else 0,
        bus_duplicate=pick((0, 30)) if faulty else 0,
        bus_us_max=pick((500, 5000, 80_000)),
        post_drop=pick((0, 50)) if faulty else 0,
        stop_rate=pick((20, 60, 100)),
        deadline_rate=pick((0, 30)),
        disconnects=pick((0, 0, 1, 2)) if faulty else 0,
        deaths=pick((0, 0, 0, 1)) if faulty else 0,
        loads=loads,
        load_blocks=2 if loads else 0,
        drain=chance(8),
    )


def draw_prompt(scenario: Scenario, chooser: Chooser) -> tuple[int, ...]:
    """A prompt from few families, so that prefixes are shared; now and then one too long."""
    vocab = scenario.shape.vocab
    longest = scenario.positions - 1
    if chooser.chance(4):
        length = chooser.between(longest + 1, longest + 20)
    else:
        length = chooser.between(1, min(longest, 30))
    family = chooser.below(3)
    shared = chooser.between(0, length)
    body = [(family * 5 + 3 * i) % vocab for i in range(shared)]
    return tuple(body + [chooser.below(vocab) for _ in range(length - shared)])


def draw_submission(
    scenario: Scenario, chooser: Chooser, index: int, at_us: int, gateway: str
) -> Submission:
    """One request."""
    params = SamplingParams(
        max_tokens=chooser.between(1, 24),
        min_tokens=chooser.pick((0, 0, 0, 4)),
        temperature=0.0,
        ignore_eos=chooser.chance(30),
        stop_token_ids=(chooser.below(scenario.shape.vocab),) if chooser.chance(20) else (),
    )

    def limit() -> float | None:
        if not chooser.chance(scenario.deadline_rate):
            return None
        return chooser.between(500, 30_000) / 1e6

    minted = START_S + at_us / 1e6 - (45.0 if chooser.chance(3) else 0.0)
    return Submission(
        uid=f"req-{index:x}-{gateway}-{index}",
        attempt=1,
        tenant=chooser.pick(TENANTS),
        prompt=draw_prompt(scenario, chooser),
        params=params,
        minted_at=minted,
        choices=chooser.pick((1, 1, 1, 2, 3)),
        deadlines=Deadlines(queue=limit(), first_token=limit(), total=limit()),
        conversation=f"conv-{chooser.below(3)}",
        salt=chooser.pick(("", "", "s")),
        gateway=gateway,
        traceparent=f"00-{index + 1:032x}-{index + 1:016x}-01",
    )


def draw_stop(
    chooser: Chooser, index: int, submission: Submission, others: list[Submission], at_us: int
) -> Stop:
    """A stop, most of them of ``submission``; some by selector, foreign, of many, of nobody."""
    kind = chooser.below(20)
    admin = chooser.chance(20)
    tenant = submission.tenant if chooser.chance(85) else chooser.pick(TENANTS)
    if kind == 0:
        target = Target(conversation=submission.conversation)
    elif kind == 1:
        target = Target(tenant=tenant)
    elif kind == 2:
        target = Target(everything=True)
    elif kind == 3:
        target = Target(uids=(f"req-nobody-{index}",))
    elif kind == 4:
        target = Target(uids=tuple(dict.fromkeys(s.uid for s in others)))
    elif kind == 5 and submission.choices > 1:
        target = Target(uids=(f"{submission.uid}.{chooser.below(submission.choices)}",))
    else:
        target = Target(uids=(submission.uid,))
    reason = Reason.ADMIN if admin else Reason.CLIENT_CANCEL
    return Stop(
        stop_id=f"stop-{index}",
        target=target,
        reason=reason,
        tenant=tenant,
        admin=admin,
        issued_at=START_S + at_us / 1e6,
        traceparent=submission.traceparent,
    )
