"""A rank on stock torch (``tcp`` transport): the part of the Linux machine. Nothing of hetdeploy is in it.

tcp_rank.py STORE_PORT RANK SIZE HOST OPERATIONS   (OPERATIONS as JSON, see operations.py)
"""

import datetime
import json
import sys

import operations
import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)


def perform(group, operation, rank, size):
    """Run one operation; return what this rank holds afterwards, or None where that is not defined."""
    kind, count, root = operation["op"], operation["count"], operation.get("root", 0)
    mine = operations.pattern(torch, count, rank).float()
    if kind == "allreduce":
        group.allreduce([mine]).wait()
        return mine
    if kind == "broadcast":
        group.broadcast(mine, root).wait()
        return mine
    if kind == "allgather":
        pieces = [torch.empty(count) for _ in range(size)]
        group.allgather([pieces], [mine]).wait()
        return torch.cat(pieces)
    if kind == "reduce":
        group.reduce(mine, root).wait()
        return mine if rank == root else None
    if kind == "gather":
        pieces = [torch.empty(count) for _ in range(size)] if rank == root else []
        group.gather(pieces, mine, root).wait()
        return torch.cat(pieces) if rank == root else None
    if kind == "scatter":
        pieces = [operations.pattern(torch, count, part).float() for part in range(size)] if rank == root else []
        group.scatter(mine.fill_(-1), pieces, root).wait()
        return mine - operations.pattern(torch, count, rank) + operations.pattern(torch, count, 0)
    if kind == "barrier":
        group.barrier().wait()
        return None
    if rank == operation["source"]:
        group.send([mine], operation["target"], operation["tag"]).wait()
    if rank == operation["target"]:
        group.recv([mine.fill_(-1)], operation["source"], operation["tag"]).wait()
        return mine
    return None


def main():
    port, rank, size = (int(argument) for argument in sys.argv[1:4])
    script = json.loads(sys.argv[5])
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=sys.argv[4])]
    # gloo puts "0/" before its keys where torch does: pygloo's side is given that prefix by the test.
    store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT, wait_for_workers=False))
    group = dist.ProcessGroupGloo(store, rank, size, options)
    for operation in script:
        got = perform(group, operation, rank, size)
        expected = operations.expected(torch, operation, size)
        if got is not None and not torch.equal(got, expected.float()):
            at = int((got != expected).nonzero()[0])
            sys.exit(f"tcp rank {rank}: {operation}: element {at} is {got[at]}, expected {expected[at]}")
        print(f"tcp rank {rank}: {operation}", flush=True)


if __name__ == "__main__":
    main()
