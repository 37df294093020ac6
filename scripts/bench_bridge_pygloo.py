"""A rank on gloo's real ``uv`` transport (pygloo), for bench_bridge.py. Runs under a Python that pygloo has wheels for.

    bench_bridge_pygloo.py RANK COUNT HOST all_reduce|broadcast

Store calls are lines on standard output, their answers lines on standard input; then each "go" is one operation.
"""

import sys
import time

import numpy as np
import pygloo

PERIOD = 1009
SIZE = 2


class LineStore:
    def _ask(self, *words):
        print(*words, flush=True)
        kind, _, rest = sys.stdin.readline().strip().partition(" ")
        if kind != "ok":
            raise RuntimeError("the store is gone")
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


def main():
    rank, count, is_broadcast = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4] == "broadcast"
    store = pygloo.rendezvous.CustomStore(LineStore())
    device = pygloo.transport.uv.CreateDevice(pygloo.transport.uv.attr(sys.argv[3]))
    context = pygloo.rendezvous.Context(rank, SIZE)
    context.connectFullMesh(store, device)
    pattern = (np.arange(count) % PERIOD).astype(np.float32)
    gate = np.zeros(1, np.float32)
    tag = 0
    print("ready", flush=True)
    for _ in sys.stdin:
        tensor = pattern + np.float32(rank)
        all_reduce(context, gate, tag)
        started = time.perf_counter()
        if is_broadcast:
            data = tensor.ctypes.data
            pygloo.broadcast(context, data, data, count, pygloo.glooDataType_t.glooFloat32, 0, tag + 1)
            all_reduce(context, gate, tag + 2)
        else:
            all_reduce(context, tensor, tag + 1)
        seconds = time.perf_counter() - started
        tag += 3 if is_broadcast else 2
        if not np.array_equal(tensor, pattern if is_broadcast else 2 * pattern + 1):
            sys.exit(f"rank {rank} got a wrong result")
        print("done", seconds, flush=True)


def all_reduce(context, array, tag):
    """In place, as torch does it. The tag is torch's number of the collective, which both ranks count alike."""
    pygloo.allreduce(
        context,
        array.ctypes.data,
        array.ctypes.data,
        array.size,
        pygloo.glooDataType_t.glooFloat32,
        pygloo.ReduceOp.SUM,
        pygloo.allreduceAlgorithm.RING,
        tag,
    )


if __name__ == "__main__":
    main()
