"""Ranks as threads of one process, over real gloo groups: cheap enough for property tests."""

import threading

import torch.distributed as dist

from hetdeploy.train.errors import PeerLost
from hetdeploy.train.world import World

DEADLINE = 60.0


def run(size, body):
    """``body(world)`` on ``size`` ranks at once; their results in rank order. A rank's exception is raised.

    One that failed by itself goes before one that only waited for it.
    """
    results = outcomes(size, body)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, (TimeoutError, PeerLost))):
        raise error
    return results


def outcomes(size, body):
    """As ``run``, but exceptions come back as results: what each rank of a failing run was told."""
    store = dist.HashStore()
    results = [TimeoutError(f"rank {rank} was still running after {DEADLINE} s") for rank in range(size)]

    def rank_main(rank):
        try:
            results[rank] = body(World.over(store, rank, size))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    return results
