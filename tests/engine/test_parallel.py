"""Plans of uneven shards, and real groups of gloo processes against one rank alone."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from stopway_cli.stack import ports
from stopway_core.types import DROPPED
from stopway_engine.modelspec import ModelError, ModelSpec, read_spec, resolve_model
from stopway_engine.parallel import plan_shards
from stopway_engine.tokenizer import load_codec

SMOL = ModelSpec(30, 576, 9, 3, 64, 1536, 49152, 1e5, 1e-5, 8192, True, 1, (2,))


@pytest.mark.parametrize(
    ("tp", "q_heads", "kv_heads", "ffn"),
    [
        (1, [(0, 9)], [(0, 3)], [(0, 1536)]),
        (2, [(0, 6), (6, 9)], [(0, 2), (2, 3)], [(0, 672), (672, 1536)]),
        (
            3,
            [(0, 3), (3, 6), (6, 9)],
            [(0, 1), (1, 2), (2, 3)],
            [(0, 512), (512, 1024), (1024, 1536)],
        ),
    ],
)
def test_tensor_parallel_plan_is_uneven_where_the_heads_are(tp, q_heads, kv_heads, ffn):
    shards = plan_shards(SMOL, tp, 1)
    assert [shard.q_heads for shard in shards] == q_heads
    assert [shard.kv_heads for shard in shards] == kv_heads
    assert [shard.ffn for shard in shards] == ffn
    assert [shard.rank for shard in shards] == list(range(tp))


def test_kv_heads_are_replicated_only_when_they_divide():
    shards = plan_shards(SMOL, 9, 1)
    assert [shard.kv_heads for shard in shards] == [(i // 3, i // 3 + 1) for i in range(9)]
    assert [shard.q_heads for shard in shards] == [(i, i + 1) for i in range(9)]
    with pytest.raises(ModelError, match=r"cannot be cut over 4 ranks: use .* 1, 2, 3, 9"):
        plan_shards(SMOL, 4, 1)


@pytest.mark.parametrize("tp", [1, 2, 3, 9])
@pytest.mark.parametrize("pp", [1, 2, 7, 30])
def test_every_plan_covers_the_model_once(tp, pp):
    shards = plan_shards(SMOL, tp, pp)
    assert [shard.rank for shard in shards] == list(range(tp * pp))
    for name, total in (("q_heads", 9), ("ffn", 1536), ("vocab", 49152)):
        spans = [getattr(shard, name) for shard in shards[:tp]]
        assert spans[0][0] == 0 and spans[-1][1] == total
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise(spans))
    assert all(shard.ffn[0] % 32 == 0 for shard in shards)
    stages = [shards[i * tp].layers for i in range(pp)]
    assert stages[0][0] == 0 and stages[-1][1] == 30
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise(stages))
    assert [shard.samples for shard in shards].count(True) == 1


def test_layers_per_stage_can_be_given():
    assert [s.layers for s in plan_shards(SMOL, 1, 2, [20, 10])] == [(0, 20), (20, 30)]
    for wrong in ([20, 11], [30], [30, 0]):
        with pytest.raises(ModelError, match="correct the list"):
            plan_shards(SMOL, 1, 2, wrong)
    with pytest.raises(ModelError, match="less pipeline"):
        plan_shards(SMOL, 1, 31)


class Groups:
    """Runs groups of processes, forked from one that has imported torch."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("rank_worker.py")
        return subprocess.Popen(
            [sys.executable, str(script), str(self.model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tp: int, pp: int, numerics: str, steps: list, overlap: bool = False) -> list:
        """[tokens, logprobs] of each step, from the rank that samples; the others have none."""
        if self.process.poll() is not None:  # a test before has lost it
            self.process.communicate()
            self.process = self._start()
        port = ports.free_ports(1, "127.0.0.1")[0]
        job = {"model": str(self.model), "tp": tp, "pp": pp, "port": port}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(
            json.dumps(job | {"numerics": numerics, "steps": steps, "overlap": overlap}),
            file=self.process.stdin,
            flush=True,
        )
        found = json.loads(self.process.stdout.readline())
        assert len(found) == tp * pp, found
        sampling = (pp - 1) * tp
        assert all(not found[rank] for rank in range(tp * pp) if rank != sampling)
        return found[sampling]


@pytest.fixture(scope="module")
def groups():
    groups = Groups(resolve_model("builtin:smollm2"))
    yield groups
    try:
        groups.process.communicate(timeout=60)
    finally:
        groups.process.kill()


@pytest.fixture(scope="module")
def capital(groups):
    """(codec, steps, answer, sampled): a greedy answer of one rank in invariant mode.

    ``steps`` replay it with the prompt in chunks, beside another sequence, every answer token fed.
    """
    codec = load_codec(groups.model, read_spec(groups.model))
    prompt = codec.chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = [*codec.encode("The capital of France is Paris."), 2]
    tokens, blocks = prompt + answer[:-1], list(range(8))
    steps, position = [], 0
    for count in [20, len(prompt) - 20] + [1] * (len(answer) - 1):
        end = position + count
        rows = [[1, position, tokens[position:end], blocks, int(end >= len(prompt))]]
        rows.append(
            [2, position, tokens[position:end][::-1], list(range(20, 28)), int(end % 2 == 0)]
        )
        steps.append(rows if position % 3 else rows[::-1])
        position = end
    return codec, steps, answer, groups.run(1, 1, "invariant", steps)


def answer_of(steps: list, sampled: list) -> list[int]:
    """The tokens that were sampled for row 1."""
    out = []
    for rows, (tokens, _) in zip(steps, sampled, strict=True):
        rids = [row[0] for row in rows if row[4]]
        out += [token for rid, token in zip(rids, tokens, strict=True) if rid == 1]
    return out


@pytest.mark.model
def test_one_rank_says_paris(capital):
    codec, steps, answer, alone = capital
    assert answer_of(steps, alone) == answer
    assert "Paris" in codec.decode(answer)


@pytest.mark.model
def test_pipeline_stages_change_no_bit(groups, capital):
    _, steps, _, alone = capital
    assert groups.run(1, 2, "invariant", steps) == alone


@pytest.mark.model
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2), (3, 1)])
def test_tensor_parallel_gives_the_same_tokens(groups, capital, tp, pp):
    _, steps, answer, alone = capital
    found = groups.run(tp, pp, "invariant", steps)
    assert answer_of(steps, found) == answer
    for (_, expected), (_, logprobs) in zip(alone, found, strict=True):
        assert logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.model
def test_fast_tensor_parallel_says_paris(groups, capital):
    codec, steps, _, _ = capital
    assert "Paris" in codec.decode(answer_of(steps, groups.run(2, 1, "fast", steps)))


def with_sources(steps: list) -> list:
    """``steps`` in which row 1 feeds what the sampler has, as soon as it has something."""
    out: list = []
    where = None  # the step and index that row 1 has sampled at
    for number, rows in enumerate(steps, 1):
        fed = [list(row) for row in rows]
        for row in fed:
            if row[0] == 1 and where:
                row[2] = [0]
                row.append(where)
        sampling = [row[0] for row in rows if row[4]]
        where = [number, sampling.index(1)] if 1 in sampling else None
        out.append(fed)
    return out


@pytest.mark.model
@pytest.mark.parametrize("tp", [1, 2])
def test_rows_with_sources_change_nothing(groups, capital, tp):
    _, steps, answer, _ = capital
    sources = with_sources(steps)
    assert sum(len(row) > 5 for rows in sources for row in rows) == len(answer) - 1
    found = groups.run(tp, 1, "invariant", sources, overlap=True)
    assert found == groups.run(tp, 1, "invariant", steps)
    assert answer_of(steps, found) == answer


@pytest.mark.model
@pytest.mark.parametrize("tp", [1, 2])
def test_a_row_whose_source_was_dropped_is_dropped(groups, tp):
    prompt, blocks = list(range(100, 140)), list(range(8))
    first = [[1, 0, prompt, blocks, 1], [2, 0, prompt[::-1], [20, 21, 22], 1, [0, 0], 0]]
    second = [[2, 40, [0], [20, 21, 22], 1, [1, 1]], [1, 40, [0], blocks, 1, [1, 0]]]
    (tokens, _), (more, _) = groups.run(tp, 1, "invariant", [first, second], overlap=True)
    alone = groups.run(tp, 1, "invariant", [first[:1], second[1:]], overlap=True)
    assert [tokens, more] == [[alone[0][0][0], DROPPED], [DROPPED, alone[1][0][0]]]
    dropped = [[1, 0, prompt, blocks, 1, [0, 0], 0]]
    found = groups.run(tp, 1, "invariant", [dropped, second[1:]], overlap=True)
    assert found == [[[DROPPED], []], [[DROPPED], []]]


@pytest.mark.model
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("everybody", [False, True])
def test_what_one_rank_knows_to_be_dead_leaves_on_all_of_its_stage(groups, tp, pp, everybody):
    """Row 2 ends on one rank, in the middle of the step; the others never see it end."""
    prompt = list(range(100, 140))
    last = (pp - 1) * tp + tp - 1  # of the last stage, so that the result shows it
    live = [1, 0, prompt, list(range(8)), 1]
    dead = [2, 0, prompt[::-1], [20, 21, 22], 1, [0, 0], last]
    follow = [1, 40, [7], list(range(8)), 1]
    steps = [[dead] if everybody else [dead, live], [follow if not everybody else live]]
    (tokens, logprobs), after = groups.run(tp, pp, "invariant", steps)
    if everybody:
        assert tokens == [DROPPED] and len(after[0]) == 1
        return
    alone = groups.run(tp, pp, "invariant", [[live], [follow]])
    assert [[[tokens[1]], logprobs], after] == alone and tokens[0] == DROPPED


@pytest.mark.model
def test_an_earlier_stage_may_drop_what_the_next_one_computes(groups):
    prompt = list(range(100, 140))
    live = [1, 0, prompt, list(range(8)), 1]
    dead = [2, 0, prompt[::-1], [20, 21, 22], 1, [0, 0], 0]
    found = groups.run(1, 2, "invariant", [[dead, live], [[*dead[:5], [0, 0], 0]]])
    alone = groups.run(1, 2, "invariant", [[live]])
    assert [found[0][0][1:], found[0][1][1:]] == alone[0]
    assert found[0][0][0] >= 0 and found[1][0][0] >= 0  # of zeros, and of no use to anybody
