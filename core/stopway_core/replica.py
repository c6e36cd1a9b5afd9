"""The replica: the state that every rank of a group has alike, changed by turns and nothing else.

Integers only: no clock, no random, no set iteration, no ``hash()``. The same turns give the same
block ids on every rank, and a rolling digest proves it now and then.

The leader's planner calls the same methods (``results``, ``end``, ``preempt``, ``admit``,
``launch``, ``close``) while it composes a turn; followers go through ``apply``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stopway_core.ledger import BLOCKS, REQUEST, Dropped, Holder, Ledger, LedgerError
from stopway_core.prefix import PrefixCache
from stopway_core.turn import Admit, Launch, Turn
from stopway_core.types import RowWork, SamplingParams, StepWork

_DIGEST_PRIME = 0x100000001B3  # FNV-1a's, 64 bits
_DIGEST_MASK = (1 << 64) - 1


class ReplicaError(AssertionError):
    """A turn that this replica cannot apply: the epoch must end."""


class Seq:
    """A running request. ``tokens`` and ``blocks`` are append-only: exec threads read prefixes."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "chain",
        "confirmed",
        "holder",
        "last_step",
        "launched",
        "live",
        "params",
        "pending",
        "prompt_len",
        "rid",
        "sealed",
        "tokens",
    )

    def __init__(self, admit: Admit) -> None:
        self.rid = admit.rid
        self.tokens = admit.tokens
        self.prompt_len = admit.prompt_len
        self.params: SamplingParams = admit.params
        self.holder: Holder = (REQUEST, admit.rid)
        self.blocks: list[int] = []
        self.cached_tokens = 0  # found in the prefix cache at admission
        self.launched = 0  # positions whose KV is written or being written
        self.confirmed = 0  # positions whose KV is written by completed steps
        self.sealed = 0  # blocks that are sealed, from the front
        self.chain = 0  # cache entry of the last sealed block
        self.last_step = 0
        self.pending = 0  # samples of steps in flight
        self.live = True


@dataclass(slots=True)
class _InFlight:
    """A launched step until its result is processed: (request, tokens fed, sampled) a row."""

    step: int
    rows: list[tuple[Seq, int, bool]]


@dataclass(slots=True)
class StopApplied:
    """What a stop did here: ``drain_step`` is the newest step that its requests were in."""

    stop_id: str
    traceparent: str
    drain_step: int
    dropped: Dropped


@dataclass(slots=True)
class Applied:
    """What a rank has to do, and to report, after a turn."""

    work: StepWork | None = None
    stops: list[StopApplied] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # rids that left this replica


class Replica:
    """Running requests, their blocks and the steps in flight of one rank."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.ledger = Ledger({BLOCKS: num_blocks})
        self.cache = PrefixCache(self.ledger, block_size)
        self.seqs: dict[int, Seq] = {}
        self.in_flight: dict[int, _InFlight] = {}
        self.turn = 0
        self.step = 0  # newest launched
        self.processed = 0  # newest whose result is processed
        self.digest = 0xCBF29CE484222325
        self._prefix_cache = prefix_cache

    # --- turns ---------------------------------------------------------------------------

    def apply(self, turn: Turn) -> Applied:
        """Apply a whole turn. Raises ``ReplicaError`` when it cannot follow the last one."""
        if turn.number != self.turn + 1:
            raise ReplicaError(f"turn {turn.number} after turn {self.turn}")
        if turn.digest is not None and turn.digest != self.digest:
            raise ReplicaError(
                f"replicas differ before turn {turn.number}: the leader's digest is "
                f"{turn.digest:#x}, this rank's {self.digest:#x}"
            )
        applied = Applied()
        for step, tokens in turn.results:
            self.results(step, tokens)
        drops: dict[int, tuple[Dropped, int]] = {rid: self.end(rid) for rid in turn.ends}
        for stop in turn.stops:
            applied.stops.append(stop_applied(stop.stop_id, stop.traceparent, stop.rids, drops))
        for rid in turn.preempts:
            self.preempt(rid)
        for admit in turn.admits:
            self.admit(admit)
        if turn.launch is not None:
            applied.work = self.launch(turn.launch)
        applied.ended = [*turn.ends, *turn.preempts]
        self.close(turn.number)
        return applied

    def close(self, number: int) -> None:
        """Finish a turn: from here on it is part of the digest."""
        self.turn = number
        pool = self.ledger.blocks
        self._mix(number)
        self._mix(pool.free)
        self._mix(pool.idle)
        self._mix(len(self.seqs))

    def results(self, step: int, tokens: list[int]) -> list[tuple[Seq, int]]:
        """A step has completed on every rank: confirm what it wrote, append what it sampled.

        Returns (request, token) for each sampled row, whether or not the request still lives; a
        dead one's token is the caller's to count as discarded.
        """
        flight = self.in_flight.pop(step, None)
        if flight is None or step <= self.processed:
            raise ReplicaError(f"a result of step {step}, which is not in flight")
        self.processed = step
        sampled: list[tuple[Seq, int]] = []
        size = self.block_size
        at = 0
        for seq, count, sample in flight.rows:
            confirmed = seq.confirmed + count
            seq.confirmed = confirmed
            if sample:
                token = tokens[at]
                at += 1
                seq.pending -= 1
                sampled.append((seq, token))
                if seq.live:
                    seq.tokens.append(token)
            if seq.live and confirmed >= (seq.sealed + 1) * size:
                self._seal(seq)
        if at != len(tokens):
            raise ReplicaError(f"step {step} sampled {at} rows, its result has {len(tokens)}")
        return sampled

    def end(self, rid: int) -> tuple[Dropped, int]:
        """A request leaves for good: what was dropped, and the newest step that it was in."""
        seq = self.seqs.pop(rid, None)
        if seq is None:
            raise ReplicaError(f"request {rid} is to end here, and is not running")
        seq.live = False
        # The fence: only now can a block become free, so only now must it know its last step.
        self.ledger.blocks.launched(seq.blocks, seq.last_step)
        dropped = self.ledger.drop(seq.holder)
        self._mix(rid)
        return dropped, seq.last_step if seq.last_step > self.processed else 0

    def preempt(self, rid: int) -> Dropped:
        """A request leaves, to be admitted again later with all the tokens that it has."""
        return self.end(rid)[0]

    def admit(self, admit: Admit) -> Seq:
        """A request enters: take its cached prefix and blocks for all its known tokens.

        Raises ``OutOfResources`` unless ``room_for`` said that it fits.
        """
        if admit.rid in self.seqs:
            raise ReplicaError(f"request {admit.rid} is admitted twice")
        seq = Seq(admit)
        shared, seq.chain = self._match(admit)
        if shared:
            self.ledger.blocks.share(seq.holder, shared)
            seq.blocks.extend(shared)
            seq.sealed = len(shared)
            seq.cached_tokens = seq.launched = seq.confirmed = len(shared) * self.block_size
        self._grow(seq, len(seq.tokens))
        self.seqs[admit.rid] = seq
        return seq

    def launch(self, launch: Launch) -> StepWork:
        """A step starts: take the blocks that it writes and say what each row computes."""
        if launch.step != self.step + 1:
            raise ReplicaError(f"step {launch.step} after step {self.step}")
        self.step = step = launch.step
        size = self.block_size
        seqs = self.seqs
        flight: list[tuple[Seq, int, bool]] = []
        rows: list[RowWork] = []
        for rid in launch.decode:
            seq = seqs[rid]
            tokens = seq.tokens
            start = seq.launched
            end = start + 1
            if end != len(tokens):
                raise ReplicaError(f"request {rid} cannot decode: {len(tokens)} known, {start} run")
            if end > len(seq.blocks) * size:
                self._grow(seq, end)
            seq.launched = end
            seq.last_step = step
            seq.pending += 1
            flight.append((seq, 1, True))
            rows.append(
                RowWork(
                    rid, start, tokens[start:], seq.blocks, True, seq.params, tokens, seq.prompt_len
                )
            )
        for rid, count in zip(launch.prefill, launch.counts, strict=True):
            seq = seqs[rid]
            start = seq.launched
            end = start + count
            sample = end == len(seq.tokens)
            if count < 1 or end > len(seq.tokens):
                raise ReplicaError(f"request {rid}: {count} tokens at {start} of {len(seq.tokens)}")
            self._grow(seq, end)
            seq.launched = end
            seq.last_step = step
            seq.pending += sample
            flight.append((seq, count, sample))
            rows.append(
                RowWork(
                    rid,
                    start,
                    seq.tokens[start:end],
                    seq.blocks,
                    sample,
                    seq.params,
                    seq.tokens,
                    seq.prompt_len,
                )
            )
        self.in_flight[step] = _InFlight(step, flight)
        return StepWork(step, rows)

    # --- what the planner asks -----------------------------------------------------------

    def room_for(self, tokens: list[int], salt: str) -> tuple[int, int]:
        """(blocks that admitting ``tokens`` would take, blocks that are there to take).

        Cached blocks that it would share are in neither number.
        """
        shared, _ = self._match_tokens(tokens, salt)
        pool = self.ledger.blocks
        refs = pool.refs
        idle_shared = sum(1 for b in shared if refs[b] == 1)
        wanted = self.blocks_of(len(tokens)) - len(shared)
        return wanted, pool.free + pool.idle - idle_shared

    def blocks_of(self, tokens: int) -> int:
        """How many blocks ``tokens`` positions need."""
        return -(-tokens // self.block_size)

    # --- proof ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``LedgerError`` unless ledger, requests and steps agree. O(everything)."""
        self.ledger.check()
        pool = self.ledger.blocks
        holders = pool.holders()
        for rid, seq in self.seqs.items():
            if pool.holds(seq.holder) != seq.blocks:
                raise LedgerError(f"request {rid}: its block table is not what it holds")
            if holders.pop(seq.holder, 0) != len(seq.blocks):
                raise LedgerError(f"request {rid}: holds are not as counted")
            if len(seq.blocks) * self.block_size < seq.launched:
                raise LedgerError(f"request {rid} runs beyond its blocks")
            for index, block in enumerate(seq.blocks):
                if bool(pool.sealed[block]) != (index < seq.sealed):
                    raise LedgerError(f"request {rid}: block {block} sealed out of order")
                if index >= seq.sealed and pool.refs[block] != 1:
                    raise LedgerError(f"request {rid}: mutable block {block} is shared")
            if seq.sealed * self.block_size > seq.confirmed or seq.confirmed > seq.launched:
                raise LedgerError(f"request {rid}: sealed, confirmed and launched out of order")
        for holder in holders:
            if holder[0] == REQUEST:
                raise LedgerError(f"{holder} holds blocks and is not running")

    def snapshot(self) -> Mapping[str, object]:
        """Counts and holders, for people: ``/debug/ledger``."""
        pool = self.ledger.blocks
        return {
            "turn": self.turn,
            "step": self.step,
            "in_flight": list(self.in_flight),
            "digest": f"{self.digest:016x}",
            "blocks": {
                "total": pool.total,
                "free": pool.free,
                "held": pool.held,
                "cached": pool.idle,
                "block_size": self.block_size,
            },
            "holders": {f"{kind}:{ident}": n for (kind, ident), n in pool.holders().items()},
        }

    # --- inside --------------------------------------------------------------------------

    def _match(self, admit: Admit) -> tuple[list[int], int]:
        return self._match_tokens(admit.tokens, admit.salt)

    def _match_tokens(self, tokens: list[int], salt: str) -> tuple[list[int], int]:
        # The last token is always computed: its logits are what the first sample comes from.
        limit = len(tokens) - 1 if self._prefix_cache else 0
        return self.cache.match(salt, tokens, limit)

    def _grow(self, seq: Seq, positions: int) -> None:
        wanted = -(-positions // self.block_size) - len(seq.blocks)
        if wanted <= 0:
            return
        pool = self.ledger.blocks
        if wanted > pool.free:
            self.cache.evict(min(wanted - pool.free, pool.idle))
        taken = pool.acquire(seq.holder, wanted)
        seq.blocks.extend(taken)
        for block in taken:
            self._mix(block)

    def _seal(self, seq: Seq) -> None:
        size = self.block_size
        pool = self.ledger.blocks
        while seq.confirmed >= (seq.sealed + 1) * size:
            index = seq.sealed
            block = seq.blocks[index]
            pool.seal(block)
            seq.sealed += 1
            if self._prefix_cache:
                run = tuple(seq.tokens[index * size : (index + 1) * size])
                seq.chain = self.cache.insert(seq.chain, run, block)

    def _mix(self, value: int) -> None:
        self.digest = ((self.digest ^ value) * _DIGEST_PRIME) & _DIGEST_MASK


def stop_applied(
    stop_id: str, traceparent: str, rids: list[int], drops: Mapping[int, tuple[Dropped, int]]
) -> StopApplied:
    """The sum of what ending ``rids`` dropped; requests that held nothing add nothing."""
    total = Dropped()
    drain = 0
    for rid in rids:
        dropped, last_step = drops[rid]
        total = total.plus(dropped)
        drain = max(drain, last_step)
    return StopApplied(stop_id, traceparent, drain, total)
