"""The replica: the state that every rank of a group has alike, changed by turns and nothing else.

Integers only: no clock, no random, no set iteration, no ``hash()``. The same turns give the same
block ids on every rank, and a rolling digest proves it now and then.

The leader's planner calls the same methods (``results``, ``end``, ``preempt``, ``admit``,
``launch``, ``close``) while it composes a turn; followers go through ``apply``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stopway_core.ledger import (
    BLOCKS,
    CACHE,
    GRAMMARS,
    Dropped,
    Ledger,
)
from stopway_core.prefix import PrefixCache
from stopway_core.proof import check, snapshot
from stopway_core.sequence import Seq
from stopway_core.turn import Admit, Launch, Sampled, Turn
from stopway_core.types import (
    DROPPED,
    NO_SOURCE,
    REJECTED,
    RowWork,
    StepWork,
)

_DIGEST_PRIME = 0x100000001B3  # FNV-1a's, 64 bits
_DIGEST_MASK = (1 << 64) - 1
COMPILE = "compile"  # holds a grammar's slot until the sampling rank has reported


class ReplicaError(AssertionError):
    """A turn that this replica cannot apply: the epoch must end."""


@dataclass(slots=True)
class _InFlight:
    """A launched step until its result is processed: (request, tokens fed, samples) a row."""

    step: int
    tokens: int
    rows: list[tuple[Seq, int, int]]


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

    def __init__(
        self, num_blocks: int, block_size: int, *, grammars: int = 32, prefix_cache: bool = True
    ) -> None:
        self.block_size = block_size
        self.ledger = Ledger({BLOCKS: num_blocks, GRAMMARS: grammars})
        self.cache = PrefixCache(self.ledger, block_size)
        self.seqs: dict[int, Seq] = {}
        self.in_flight: dict[int, _InFlight] = {}
        self.turn = 0
        self.step = 0  # newest launched
        self.processed = 0  # newest whose result is processed
        self.digest = 0xCBF29CE484222325
        self._prefix_cache = prefix_cache
        self._copies: list[tuple[int, int]] = []  # for the next launch
        self._left: list[int] = []  # likewise: requests with a grammar that have gone

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
        for result in turn.results:
            self.results(result)
        for slot in turn.compiled:
            self.compiled(slot)
        drops: dict[int, tuple[Dropped, int]] = {rid: self.end(rid) for rid in turn.ends}
        for stop in turn.stops:
            applied.stops.append(stop_applied(stop.stop_id, stop.traceparent, stop.rids, drops))
        for rid in turn.preempts:
            self.preempt(rid)
        if turn.evicts:
            self.cache.evict(turn.evicts)
        for slot in turn.forgets:
            self.forget(slot)
        for compile in turn.compiles:
            if self.compile() != compile.slot:
                raise ReplicaError(f"grammar slot {compile.slot} is not the next that is free")
        for admit in turn.admits:
            self.admit(admit)
        if turn.launch is not None:
            applied.work = self.launch(turn.launch)
        applied.ended = [*turn.ends, *turn.preempts]
        self.close(turn.number)
        return applied

    def close(self, number: int) -> None:
        """Finish a turn: from here on it is part of the digest."""
        if self._copies:
            raise ReplicaError(f"turn {number} forks a request and launches nothing")
        self.turn = number
        pool = self.ledger.blocks
        self._mix(number)
        self._mix(pool.free)
        self._mix(pool.idle)
        self._mix(self.ledger.pools[GRAMMARS].free)
        self._mix(len(self.seqs))

    def results(self, result: Sampled) -> list[tuple[Seq, int, list[int]]]:
        """A step has completed on every rank: confirm what it wrote, append what it sampled.

        Returns (request, samples, tokens) for each sampling row, whether or not the request still
        lives; a dead one's tokens are the caller's to count as discarded. The last token may be
        ``REJECTED``, or ``DROPPED`` of one that is dead or has been rejected.
        """
        step, tokens, counts = result
        flight = self.in_flight.pop(step, None)
        if flight is None or step <= self.processed:
            raise ReplicaError(f"a result of step {step}, which is not in flight")
        self.processed = step
        sampled: list[tuple[Seq, int, list[int]]] = []
        size = self.block_size
        row = at = 0
        for seq, fed, samples in flight.rows:
            if samples:
                count = counts[row] if counts else 1
                kept = tokens[at : at + count]
                row += 1
                at += count
                if not kept or count > samples:
                    raise ReplicaError(f"step {step}: {count} tokens for {samples} samples")
                seq.pending -= 1
                sampled.append((seq, samples, kept))
            if not seq.live:
                continue
            if samples:
                if kept[-1] == DROPPED:
                    if not seq.rejected:
                        raise ReplicaError(f"step {step} dropped request {seq.rid}, which lives")
                    continue
                if kept[-1] == REJECTED:
                    seq.rejected = True
                    kept = kept[:-1]
                if samples > 1:  # drafts: what follows the first wrong one was never written
                    fed = count
                    seq.launched = seq.confirmed + fed
                seq.tokens.extend(kept)
            seq.confirmed += fed
            if seq.confirmed >= (seq.sealed + 1) * size:
                self._seal(seq)
        if at != len(tokens):
            raise ReplicaError(f"step {step} sampled {at} tokens, its result has {len(tokens)}")
        return sampled

    def end(self, rid: int) -> tuple[Dropped, int]:
        """A request leaves for good: what was dropped, and the newest step that it was in."""
        seq = self._take_out(rid)
        seq.pulse.beats = False
        return self._drop(seq), seq.last_step if seq.last_step > self.processed else 0

    def preempt(self, rid: int) -> Dropped:
        """A request leaves, to be admitted again later with all the tokens that it has.

        Its rows in flight are computed to their end, since their tokens may be delivered.
        """
        return self._drop(self._take_out(rid))

    def admit(self, admit: Admit) -> Seq:
        """A request enters: take its cached prefix and blocks for all its known tokens.

        Raises ``OutOfResources`` unless ``room_for`` said that it fits.
        """
        if admit.rid in self.seqs:
            raise ReplicaError(f"request {admit.rid} is admitted twice")
        seq = Seq(admit)
        if admit.fork:
            self._fork(seq, admit)
        else:
            shared, seq.chain = self._match(admit.tokens, admit.salt)
            self._share(seq, shared, len(shared) * self.block_size)
        self._grow(seq, len(seq.tokens))
        if admit.grammar:
            self.ledger.hold(seq.holder, GRAMMARS, admit.grammar - 1)
        self.seqs[admit.rid] = seq
        return seq

    def launch(self, launch: Launch) -> StepWork:
        """A step starts: take the blocks that it writes and say what each row computes."""
        if launch.step != self.step + 1:
            raise ReplicaError(f"step {launch.step} after step {self.step}")
        self.step = step = launch.step
        seqs = self.seqs
        flight: list[tuple[Seq, int, int]] = []
        rows: list[RowWork] = []
        drafts = launch.drafts
        sampling = 0
        for index, rid in enumerate(launch.decode):
            seq = seqs[rid]
            fed, source = self._decode_of(seq)
            if drafts and drafts[index]:
                if seq.pending:
                    raise ReplicaError(f"request {rid}: a draft after a token that is not known")
                fed = fed + drafts[index]
            rows.append(self._row(seq, fed, len(fed), source, sampling))
            flight.append((seq, len(fed), len(fed)))
            sampling += 1
        for rid, count in zip(launch.prefill, launch.counts, strict=True):
            seq = seqs[rid]
            start = seq.launched
            end = start + count
            if count < 1 or end > len(seq.tokens):
                raise ReplicaError(f"request {rid}: {count} tokens at {start} of {len(seq.tokens)}")
            samples = int(end == len(seq.tokens))
            rows.append(self._row(seq, seq.tokens[start:end], samples, NO_SOURCE, sampling))
            flight.append((seq, count, samples))
            sampling += samples
        self.in_flight[step] = _InFlight(step, launch.tokens, flight)
        work = StepWork(step, rows, self._copies, self._left)
        for source_block, _ in self._copies:  # read by this step, whoever holds it by then
            self.ledger.blocks.launched((source_block,), step)
        self._copies, self._left = [], []
        return work

    def _decode_of(self, seq: Seq) -> tuple[list[int], tuple[int, int]]:
        """What a request that decodes feeds: its newest token, or where that will come from."""
        known, start = seq.tokens, seq.launched
        # One token may be unknown, not two: what came before it is read from ``history``.
        if start + 1 != len(known) + seq.pending or seq.pending > 1:
            raise ReplicaError(
                f"request {seq.rid} cannot decode: {len(known)} known, {seq.pending} to come, "
                f"{start} run"
            )
        return ([0], seq.source) if seq.pending else (known[start:], NO_SOURCE)

    def _row(
        self, seq: Seq, fed: list[int], samples: int, source: tuple[int, int], index: int
    ) -> RowWork:
        """Put a request into the step that is being launched; ``index`` is of its sampling rows."""
        start = seq.launched
        end = seq.launched = start + len(fed)
        if end > len(seq.blocks) * self.block_size:
            self._grow(seq, end)
        seq.last_step = self.step
        if samples:
            seq.pending += 1
            seq.source = (self.step, index)
        return RowWork(
            seq.rid,
            start,
            fed,
            seq.blocks,
            samples,
            seq.params,
            seq.tokens,
            seq.prompt_len,
            source,
            seq.grammar,
            seq.pulse,
        )

    # --- grammars ------------------------------------------------------------------------

    def compile(self) -> int:
        """Take a slot for a grammar that is to be compiled, off-queue; returns its number.

        Raises ``OutOfResources`` when there is none.
        """
        pool = self.ledger.pools[GRAMMARS]
        slot = 1 + pool.peek()
        pool.acquire((COMPILE, slot), 1)
        return slot

    def compiled(self, slot: int) -> None:
        """The rank that samples has reported: the slot may be shared, and is cached."""
        pool = self.ledger.pools[GRAMMARS]
        pool.seal(slot - 1)
        pool.hold((CACHE, -slot), slot - 1)  # below zero: apart from the entries of blocks
        self.ledger.drop((COMPILE, slot))

    def forget(self, slot: int) -> None:
        """A grammar is not worth its slot any more, or could not be compiled."""
        self.ledger.drop((COMPILE, slot))
        self.ledger.drop((CACHE, -slot))

    # --- what the planner asks -----------------------------------------------------------

    def room_for(self, tokens: list[int], salt: str, fork: int = 0) -> tuple[int, int]:
        """(blocks that admitting ``tokens`` would take, blocks that are there to take).

        Cached blocks that it would share are in neither number.
        """
        pool = self.ledger.blocks
        if fork:
            shared = self.seqs[fork].blocks[: (len(tokens) - 1) // self.block_size]
        else:
            shared, _ = self._match(tokens, salt)
        refs, cached = pool.refs, pool.cached
        idle_shared = sum(1 for b in shared if refs[b] == 1 and cached[b])
        wanted = self.blocks_of(len(tokens)) - len(shared)
        return wanted, pool.free + pool.idle - idle_shared

    def can_fork(self, rid: int, prompt_len: int) -> bool:
        """Whether a request runs here and its prompt has been computed."""
        seq = self.seqs.get(rid)
        return seq is not None and seq.confirmed >= prompt_len

    @property
    def tokens_in_flight(self) -> int:
        """Rows of the forward passes in flight."""
        return sum(flight.tokens for flight in self.in_flight.values())

    def blocks_of(self, tokens: int) -> int:
        """How many blocks ``tokens`` positions need."""
        return -(-tokens // self.block_size)

    # --- proof ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``LedgerError`` unless ledger, requests and steps agree. O(everything)."""
        check(self)

    def snapshot(self) -> Mapping[str, object]:
        """Counts and holders, for people: ``/debug/ledger``."""
        return snapshot(self)

    # --- inside --------------------------------------------------------------------------

    def _match(self, tokens: list[int], salt: str) -> tuple[list[int], list[int]]:
        # The last token is always computed: its logits are what the first sample comes from.
        limit = len(tokens) - 1 if self._prefix_cache else 0
        return self.cache.match(salt, tokens, limit)

    def _share(self, seq: Seq, shared: list[int], tokens: int) -> None:
        """Start with KV that is there: sealed blocks, and ``tokens`` positions in all."""
        if shared:
            self.ledger.blocks.share(seq.holder, shared)
            seq.blocks.extend(shared)
            seq.sealed = len(shared)
        seq.cached_tokens = seq.launched = seq.confirmed = tokens

    def _fork(self, seq: Seq, admit: Admit) -> None:
        """Share the sealed blocks of a running request; copy the one that both will write.

        Its last prompt token is computed again: the first sample comes from its logits.
        """
        source = self.seqs.get(admit.fork)
        keep = len(seq.tokens) - 1
        if source is None or source.confirmed <= keep:
            raise ReplicaError(f"request {admit.rid} cannot be forked from {admit.fork}")
        full, rest = divmod(keep, self.block_size)
        seq.chain = source.chain[: full + 1]
        self._share(seq, source.blocks[:full], keep)
        if rest:
            self._grow(seq, keep)
            self._copies.append((source.blocks[full], seq.blocks[full]))

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

    def _take_out(self, rid: int) -> Seq:
        seq = self.seqs.pop(rid, None)
        if seq is None:
            raise ReplicaError(f"request {rid} is to end here, and is not running")
        seq.live = False
        if seq.grammar:
            self._left.append(rid)
        return seq

    def _drop(self, seq: Seq) -> Dropped:
        # The fence: only now can a block become free, so only now must it know its last step.
        self.ledger.blocks.launched(seq.blocks, seq.last_step)
        self._mix(seq.rid)
        return self.ledger.drop(seq.holder)

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
                seq.chain.append(self.cache.insert(seq.chain[-1], run, block))

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
