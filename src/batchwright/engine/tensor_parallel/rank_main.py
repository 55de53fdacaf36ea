"""The process of a rank other than 0: `python -m batchwright.engine.tensor_parallel.rank_main DESCRIPTOR`.

It computes its part of each step that rank 0 sends, and ends when rank 0 is gone, whatever it is doing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue

from batchwright.engine.tensor_parallel.messages import (
    Allocate,
    Allocated,
    Failed,
    FromRank,
    Joined,
    Load,
    Loaded,
    Step,
    ToRank,
)

_FAILED = 70
"""Exit status of a rank that cannot go on."""


def main() -> None:
    """Load what the first message names, and compute steps until rank 0 is gone."""
    # Ctrl-C is meant for the process of rank 0, whose end this one notices.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[FromRank, ToRank] = Connection(int(sys.argv[1]))
    order = connection.recv()
    assert isinstance(order, Load)
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)  # before importing torch, which counts them
    steps: SimpleQueue[ToRank] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, steps), daemon=True).start()
    try:
        _follow(order, connection, steps)
    except BaseException as error:
        from batchwright.engine.bodies.shard import RankUnreachable

        is_own = not isinstance(error, RankUnreachable)
        with suppress(OSError):
            connection.send(Failed(f"{type(error).__name__}: {error}" if is_own else str(error), is_own))
        os._exit(_FAILED)  # without waiting for a device that is waiting for other ranks


def _receive(connection: Connection[FromRank, ToRank], steps: SimpleQueue[ToRank]) -> None:
    try:
        while True:
            steps.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _follow(order: Load, connection: Connection[FromRank, ToRank], steps: SimpleQueue[ToRank]) -> None:
    import torch

    from batchwright.engine.bodies.load import load_shard
    from batchwright.engine.bodies.shard import Shard
    from batchwright.engine.step.batch import batch_of
    from batchwright.engine.tensor_parallel.group import join_group

    if order.config.device.startswith("cuda"):
        torch.cuda.set_device(order.config.device)
    body = load_shard(order.folder, order.config, Shard(order.rank, order.ranks))
    connection.send(Loaded(body.free_memory()))
    size = steps.get()
    assert isinstance(size, Allocate)
    body.allocate(size.num_blocks, size.block_size, size.attention)
    connection.send(Allocated())
    join_group(size.meeting, order.rank, order.ranks, body.device)
    connection.send(Joined())
    with torch.inference_mode():
        while True:
            step = steps.get()
            assert isinstance(step, Step)
            body.forward(
                batch_of(
                    step.token_ids,
                    step.counts,
                    step.starts,
                    step.tables,
                    step.logit_rows,
                    size.block_size,
                    body.device,
                )
            )


if __name__ == "__main__":
    main()
