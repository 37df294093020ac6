"""A rank on gloo's real ``uv`` transport (pygloo): the part of the Mac. Runs under a Python that pygloo has wheels for.

uv_rank.py STORE_PORT RANK SIZE HOST OPERATIONS   (OPERATIONS as JSON, see operations.py)
"""

import json
import socket
import sys
import time

import numpy as np
import operations
import pygloo

FLOAT = pygloo.glooDataType_t.glooFloat32


class LineStore:
    """A store whose every call is one line to the test, and one line back."""

    def __init__(self, port):
        self._lines = socket.create_connection(("127.0.0.1", port)).makefile("rwb")

    def _ask(self, *words):
        self._lines.write(" ".join(words).encode() + b"\n")
        self._lines.flush()
        kind, _, rest = self._lines.readline().decode().strip().partition(" ")
        if kind != "ok":
            raise RuntimeError(f"store: {rest}")
        return rest

    def set(self, key, value):
        self._ask("set", key, (value.encode("latin-1") if isinstance(value, str) else bytes(value)).hex())
        return True

    def get(self, key):
        return bytes.fromhex(self._ask("get", key))

    def wait(self, keys, timeout=None):
        self._ask("wait", *keys)
        return True

    def delKeys(self, keys):
        return True


def perform(context, operation, tag, rank, size):
    """Run one operation; return what this rank holds afterwards (None: not defined), as numpy."""
    kind, count, root = operation["op"], operation["count"], operation.get("root", 0)
    mine = operations.pattern(np, count, rank).astype(np.float32)
    result = np.full_like(mine, -1)
    if kind == "allreduce":
        algorithm = pygloo.allreduceAlgorithm.RING
        total = pygloo.ReduceOp.SUM
        pygloo.allreduce(context, mine.ctypes.data, result.ctypes.data, count, FLOAT, total, algorithm, tag)
        return result
    if kind == "broadcast":
        pygloo.broadcast(context, mine.ctypes.data, result.ctypes.data, count, FLOAT, root, tag)
        return result
    if kind == "allgather":
        result = np.full(count * size, -1, np.float32)
        pygloo.allgather(context, mine.ctypes.data, result.ctypes.data, count, FLOAT, tag)
        return result
    if kind == "reduce":
        pygloo.reduce(context, mine.ctypes.data, result.ctypes.data, count, FLOAT, pygloo.ReduceOp.SUM, root, tag)
        return result if rank == root else None
    if kind == "gather":
        result = np.full(count * size, -1, np.float32)
        pygloo.gather(context, mine.ctypes.data, result.ctypes.data, count, FLOAT, root, tag)
        return result if rank == root else None
    if kind == "scatter":
        pieces = [operations.pattern(np, count, part).astype(np.float32) for part in range(size)]
        addresses = [piece.ctypes.data for piece in pieces] if rank == root else []
        pygloo.scatter(context, addresses, result.ctypes.data, count, FLOAT, root, tag)
        return result - operations.pattern(np, count, rank) + operations.pattern(np, count, 0)
    if kind == "barrier":
        pygloo.barrier(context, tag)
        return None
    source, target = operation["source"], operation["target"]
    if rank == source:
        pygloo.send(context, mine.ctypes.data, count, FLOAT, target, operation["tag"])
    if rank == target:
        pygloo.recv(context, result.ctypes.data, count, FLOAT, source, operation["tag"])
        return result
    return None


def main():
    port, rank, size = (int(argument) for argument in sys.argv[1:4])
    script = json.loads(sys.argv[5])
    store = pygloo.rendezvous.CustomStore(LineStore(port))
    device = pygloo.transport.uv.CreateDevice(pygloo.transport.uv.attr(sys.argv[4]))
    context = pygloo.rendezvous.Context(rank, size)
    context.connectFullMesh(store, device)
    tag = 0
    for operation in script:
        started = time.perf_counter()
        got = perform(context, operation, tag, rank, size)
        tag += operation["op"] != "send"
        expected = operations.expected(np, operation, size)
        if got is not None and not np.array_equal(got, expected):
            at = int(np.nonzero(got != expected)[0][0])
            sys.exit(f"uv rank {rank}: {operation}: element {at} is {got[at]}, expected {expected[at]}")
        print(f"uv rank {rank}: {operation} {time.perf_counter() - started:.3f} s", flush=True)


if __name__ == "__main__":
    main()
