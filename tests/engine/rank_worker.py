"""Runs test groups: one job a line on stdin, one line of JSON with what each rank sampled.

A job is {"model", "tp", "pp", "port", "numerics", "steps"}; a step is a list of rows
[rid, start, tokens, blocks, sample], and every rank runs the same ones. Ranks are forked from this
process, which has imported torch but run nothing, so that a group starts in a second.
"""

import json
import multiprocessing
import sys
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
    )
    params = SamplingParams(temperature=0.0, logprobs=0)
    sampled = []
    for i, rows in enumerate(job["steps"]):
        work = [
            RowWork(rid, start, tokens, blocks, sample, params, tokens, start + len(tokens))
            for rid, start, tokens, blocks, sample in rows
        ]
        result = executor.run(StepWork(i, work))
        if result is not None:
            logprobs = [found.logprob for found in result.logprobs if found is not None]
            sampled.append([result.tokens, logprobs])
    pipe.send_bytes(json.dumps(sampled).encode())
    executor.close()


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
