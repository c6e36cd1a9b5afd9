"""One rank, for one epoch: ``python -m stopway_engine.rank``, started by ``supervise``.

It meets the others, loads its shard in the exec thread, and serves turns in the control thread.
When anything is lost it leaves at once, with ``EXIT_EPOCH_ENDED``; ``supervise`` starts the next.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stopway_core.policies import POLICIES
from stopway_core.wire import FrameKind, encode
from stopway_engine.config import (
    EXIT_CONFIG,
    EXIT_EPOCH_ENDED,
    ConfigError,
    PodConfig,
    load_config,
)
from stopway_engine.control.follower import Follower
from stopway_engine.control.forming import Formed, LeaderForming, join
from stopway_engine.control.leader import Leader
from stopway_engine.control.loop import ControlLoop, EpochEnded
from stopway_engine.exec_thread import ExecThread, Runner
from stopway_engine.grammar.compiler import GrammarCompiler
from stopway_engine.grammar.matchers import GrammarTable
from stopway_engine.link import Link, LinkClosed
from stopway_engine.modelspec import (
    ModelError,
    ModelSpec,
    read_spec,
    resolve_model,
    weights_fingerprint,
)
from stopway_engine.numerics import Numerics, threads_for
from stopway_engine.parallel import ShardSpec, plan_shards
from stopway_engine.tokenizer import load_codec

BLOCKS_MIN = 4
CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85
CPU_BATCH_TOKENS = 256
CUDA_BATCH_TOKENS = 4096


def main() -> None:
    """The process. Never returns: it exits with a code that tells ``supervise`` what to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to ``supervise``, too
    pod = Link(socket.socket(fileno=int(os.environ["STOPWAY_POD_FD"])), "supervise")
    try:
        code = _serve(pod)
    except (ConfigError, ModelError) as error:
        pod.send(encode(FrameKind.POD_OUT, {"fatal": str(error)}))
        pod.drain(1.0)
        code = EXIT_CONFIG
    except EpochEnded as ended:
        ControlLoop.log(f"epoch ended: {ended}")
        code = EXIT_EPOCH_ENDED
    except BaseException:
        traceback.print_exc()
        code = EXIT_EPOCH_ENDED
    # Not sys.exit: a step that hangs in a collective must not keep the process.
    os._exit(code)


def _serve(pod: Link) -> int:
    config = load_config()
    rank = int(os.environ["STOPWAY_RANK"])
    sys.setswitchinterval(0.001)  # the control thread must not wait long for the interpreter
    path = resolve_model(config.model)
    spec = read_spec(path)
    shard = plan_shards(spec, config.tensor, config.pipeline)[rank]
    mine = {
        "group": config.group,
        "rank": rank,
        "pod_uid": config.pod_uid,
        "node": config.node,
        "fingerprint": config.fingerprint(weights_fingerprint(path), version("stopway")),
        "blocks": _num_blocks(config, spec, shard),
        "last_epoch": int(os.environ.get("STOPWAY_LAST_EPOCH", "0")),
    }
    beat = _beat(pod)
    if rank == 0:
        formed = LeaderForming(config, mine, _free_port, beat).run()
    else:
        formed = join(config, mine, beat)
    compiler = None
    if shard.samples:
        compiler = GrammarCompiler(lambda: load_codec(path))
        compiler.start()
    table = compiler.table if compiler is not None else None
    exec_thread = ExecThread(lambda: _build(config, path, spec, shard, formed, table))
    exec_thread.start()
    loop: ControlLoop
    if rank == 0:
        planning = {
            "max_model_len": _max_model_len(config, spec),
            "eos_ids": frozenset(spec.eos),
            "max_batch_tokens": config.max_batch_tokens
            or (CUDA_BATCH_TOKENS if _device(config) == "cuda" else CPU_BATCH_TOKENS),
        }
        loop = Leader(
            config,
            formed.epoch,
            formed.nodes,
            planning,
            formed.blocks,
            pod,
            formed.links,
            exec_thread,
            compiler,
            os.environ["STOPWAY_FRONT_SOCKET"],
        )
    else:
        loop = Follower(
            config, rank, formed.epoch, formed.blocks, pod, formed.links[0], exec_thread, compiler
        )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from now on ``supervise`` is listened to
    loop.run()
    exec_thread.finish(1.0)
    return 0


def _beat(pod: Link) -> Any:
    """A function that tells ``supervise`` now and then that this rank lives and is forming."""
    last = 0.0

    def beat() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 0.5:
            last = now
            try:
                pod.send(encode(FrameKind.POD_OUT, {"state": "forming", "epoch": 0}))
            except LinkClosed:
                raise EpochEnded("the pod's supervise is gone") from None

    return beat


def _build(
    config: PodConfig,
    path: Path,
    spec: ModelSpec,
    shard: ShardSpec,
    formed: Formed,
    grammars: GrammarTable | None,
) -> Runner:
    """Runs in the exec thread: everything that touches torch starts here."""
    from stopway_engine.collective import connect
    from stopway_engine.executor import Executor

    numerics = Numerics(config.numerics)
    device = _device(config)
    if config.leader_host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    started = time.monotonic()
    collective = connect(
        shard,
        store_host=config.leader_host,
        store_port=formed.store_port,
        backend="nccl" if device == "cuda" else "gloo",
        timeout_s=config.step_timeout_s,
        ordered=numerics is Numerics.INVARIANT,
    )
    executor = Executor(
        path,
        shard,
        numerics=numerics,
        device=device,
        threads=config.threads or threads_for(config.ranks_per_pod, numerics),
        num_blocks=formed.blocks,
        block_size=config.block_size,
        collective=collective,
        spec=spec,
        grammars=grammars,
        overlap=config.pipeline == 1,
        leaves=POLICIES[config.policy].leaves_steps,
    )
    executor.warmup()
    ControlLoop.log(
        f"rank {shard.rank} of {shard.world} is loaded on {device}, {formed.blocks} blocks, in "
        f"{time.monotonic() - started:.1f} s"
    )
    return executor


def _device(config: PodConfig) -> str:
    if config.device != "auto":
        return config.device
    if not os.path.exists("/dev/nvidiactl"):
        return "cpu"  # without importing torch, which takes seconds
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _max_model_len(config: PodConfig, spec: ModelSpec) -> int:
    if config.max_model_len > spec.context:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's context of {spec.context}"
        )
    return config.max_model_len or spec.context


def _num_blocks(config: PodConfig, spec: ModelSpec, shard: ShardSpec) -> int:
    if config.kv_blocks:
        if config.kv_blocks < BLOCKS_MIN:
            raise ConfigError(
                f"{config.kv_blocks} KV blocks are too few to serve anything; give at least "
                f"{BLOCKS_MIN} (or 0 to have the number chosen)"
            )
        return config.kv_blocks
    from stopway_engine.kv import choose_num_blocks  # imports torch

    memory = CPU_KV_BYTES
    device = _device(config)
    if device == "cuda":
        import torch

        memory = int(torch.cuda.mem_get_info()[0] * CUDA_KV_SHARE)
    numerics = Numerics(config.numerics)
    return choose_num_blocks(spec, shard, numerics, memory, device, config.block_size)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
