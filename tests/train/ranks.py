"""Ranks as threads of one process, over real gloo groups: cheap enough for property tests."""

import threading

import torch.distributed as dist

from hetdeploy.train.world import World

DEADLINE = 60.0


def run(size, body):
    """``body(world)`` on ``size`` ranks at once; their results in rank order. The first rank's exception is raised."""
    results = outcomes(size, body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
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
