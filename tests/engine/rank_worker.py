"""Runs test groups: one job a line on stdin, one line of JSON with what each rank sampled.

A job is {"model", "tp", "pp", "port", "numerics", "steps", "overlap"?}; a step is a list of rows
[rid, start, tokens, blocks, samples, source?, dead?], and every rank runs the same ones. The
request of a row with ``dead`` ends on the rank of that number alone, when its first layer is
through. Ranks are forked from this process, which has imported torch but run nothing, so that a
group starts in a second.
"""

import json
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from stopway_core.types import RowWork, SamplingParams, StepWork
from stopway_engine.collective import connect
from stopway_engine.executor import Executor
from stopway_engine.modelspec import read_spec
from stopway_engine.numerics import Numerics
from stopway_engine.parallel import plan_shards


def run_rank(job: dict, rank: int, pipe: Connection) -> None:
    path = Path(job["model"])
    shard = plan_shards(read_spec(path), job["tp"], job["pp"])[rank]
    numerics = Numerics(job["numerics"])
    collective = connect(
        shard,
        store_host="127.0.0.1",
        store_port=job["port"],
        backend="gloo",
        timeout_s=60,
        ordered=numerics is Numerics.INVARIANT,
    )
    executor = Executor(
        path,
        shard,
        numerics=numerics,
        device="cpu",
        threads=1,
        num_blocks=64,
        collective=collective,
        overlap=job.get("overlap", False),
    )
    sampled = []
    for step, rows in enumerate(job["steps"], 1):
        work = [work_of(row, rank) for row in rows]
        with dying([row for row in work if not row.pulse.beats], executor):
            result = executor.run(StepWork(step, work))
        if result is not None:
            logprobs = [found.logprob for found in result.logprobs if found is not None]
            sampled.append([result.tokens, logprobs])
    pipe.send_bytes(json.dumps(sampled).encode())
    executor.close()


def work_of(row: list, rank: int) -> RowWork:
    rid, start, tokens, blocks, samples, *more = row
    source, dead = [*more, *([0, 0], -1)[len(more) :]]
    params = SamplingParams(temperature=0.0, logprobs=0)
    work = RowWork(rid, start, tokens, blocks, samples, params, tokens, start + len(tokens))
    work.source = (source[0], source[1])
    work.pulse.beats = dead != rank
    return work


@contextmanager
def dying(rows: list[RowWork], executor: Executor) -> Iterator[None]:
    """Within, ``rows`` live until the first layer of the stage is through."""
    layers = executor._model._layers
    first = layers[0]

    def end(*args) -> None:
        first(*args)
        for row in rows:
            row.pulse.beats = False

    for row in rows:
        row.pulse.beats = True
    if rows:
        layers[0] = end
    yield
    layers[0] = first


def run_group(job: dict) -> list:
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(job["tp"] * job["pp"]):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(job, rank, theirs))
        process.start()
        theirs.close()
        ranks.append((process, mine))
    try:
        return [json.loads(pipe.recv_bytes()) if pipe.poll(90) else None for _, pipe in ranks]
    except EOFError:
        return ["a rank died: see stderr"]
    finally:
        for process, _ in ranks:
            process.join(10)
            process.kill()


def main() -> None:
    for path in sys.argv[1:]:
        read_spec(Path(path))  # parsed once, before the fork
    for line in sys.stdin:
        print(json.dumps(run_group(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
