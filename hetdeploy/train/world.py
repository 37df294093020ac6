"""Who exchanges with whom: ranks, and the gloo groups they open among themselves.

A part of this package never uses the script's own process group for its traffic. It opens groups of its own, because
gloo matches collectives by the order in which they are started and the script may start others meanwhile from another
thread.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

# The first step of an optimizer imports this module (torch 2.13), and its functions bind the default group of that
# moment as a default argument. Imported before there is one, it cannot keep the group's threads alive beyond
# destroy_process_group, where they would abort the interpreter's exit.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import distributed_c10d

from hetdeploy.train.errors import PeerLost

Store: TypeAlias = Any
"""A ``torch.distributed.Store``. Its type stubs lack what is used of it here (clone, check)."""

LEAVE_SECONDS = 3.0
"""An exchange that the other ranks never answer keeps a group busy: then the process ends without waiting for it."""

LAST_RELEASE_SECONDS = 0.05
"""What gloo's threads take to give back the tensors of what has just ended."""

EXCHANGE_TIMEOUT = datetime.timedelta(minutes=5)
"""How long a rank waits for the slowest one in an exchange before it calls it lost."""


class World:
    """The ranks of one run. ``open`` is collective: every rank opens the same groups in the same order."""

    def __init__(self, rank: int, size: int, connect: Callable[[str, datetime.timedelta], Any]) -> None:
        self.rank = rank
        self.size = size
        self._connect = connect
        self._opened = 0

    @classmethod
    def current(cls) -> World:
        """The script's default process group; where there is none, a world of one that exchanges nothing."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls.solo()

        def connect(_purpose: str, timeout: datetime.timedelta) -> Any:
            return dist.new_group(backend="gloo", timeout=timeout)

        return cls(dist.get_rank(), dist.get_world_size(), connect)

    @classmethod
    def over(cls, store: Store, rank: int, size: int) -> World:
        """``size`` ranks that share ``store`` and need no default process group: a crew's pair, or threads of a
        test.
        """

        def connect(purpose: str, timeout: datetime.timedelta) -> Any:
            # By name at every call: a launcher may have put a subclass there that reaches other dialects of gloo.
            return distributed_c10d.ProcessGroupGloo(prefixed(purpose, store), rank, size, timeout)

        return cls(rank, size, connect)

    @classmethod
    def solo(cls) -> World:
        """One rank alone."""

        def connect(purpose: str, _timeout: datetime.timedelta) -> Any:
            raise AssertionError(f"a world of one opens no group ({purpose})")

        return cls(0, 1, connect)

    def open(self, purpose: str, timeout: datetime.timedelta = EXCHANGE_TIMEOUT) -> Group:
        """A new gloo group of all ranks, for ``purpose`` (named in errors). Raises PeerLost if a rank does not come."""
        self._opened += 1
        try:
            backend = self._connect(f"hetdeploy/{purpose}/{self._opened}", timeout)
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} could not open a group for {purpose}: {_first_line(error)}") from error
        return Group(backend, self.rank, self.size, purpose)


class Group:
    """CPU tensors between the ranks of one gloo group. Everything starts at once and is awaited by ``Pending.wait``."""

    def __init__(self, backend: Any, rank: int, size: int, purpose: str) -> None:
        self._backend = backend
        self.rank = rank
        self.size = size
        self.purpose = purpose
        _open_groups.add(self)

    def close(self) -> None:
        """Let go of the connections, as far as this group holds them."""
        self._backend = None

    def all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """``received``: as long as ``size`` times ``sent``, in rank order."""
        return self._start(lambda: self._backend._allgather_base(received, sent), received, sent)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Pending:
        """Equal parts: part j of ``sent`` goes to rank j, part i of ``received`` comes from rank i."""
        return self._start(lambda: self._backend.alltoall_base(received, sent, [], []), received, sent)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Rank ``source``'s tensor, on every rank."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._start(lambda: self._backend.broadcast([tensor], options), tensor)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Pending:
        """To ``peer``, who receives it with the same tag."""
        return self._start(lambda: self._backend.send([tensor], peer, tag), tensor)

    def receive(self, tensor: Tensor, peer: int, tag: int = 0) -> Pending:
        """From ``peer``. Sizes must agree: gloo ends the process otherwise, which is why layouts are compared first."""
        return self._start(lambda: self._backend.recv([tensor], peer, tag), tensor)

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order; they may differ in length."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        self.all_gather(sizes, torch.tensor([len(mine)])).wait("comparing sizes")
        longest = int(sizes.max())
        if longest == 0:
            return [b""] * self.size
        everyone = torch.zeros(self.size * longest, dtype=torch.uint8)
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        self.all_gather(everyone, padded).wait("gathering descriptions")
        packed = bytes(everyone.numpy())
        return [packed[i * longest : i * longest + int(size)] for i, size in enumerate(sizes)]

    def _start(self, start: Callable[[], Any], *tensors: Tensor) -> Pending:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise AssertionError(f"gloo takes CPU tensors only, {self.purpose} was given {tensor.device}")
        try:
            return Pending(self, start(), tensors)
        except RuntimeError as error:
            raise self.lost(error, "starting an exchange") from error

    def lost(self, error: RuntimeError, doing: str) -> PeerLost:
        """What gloo's error means to the person who reads it."""
        return PeerLost(
            f"rank {self.rank} lost another rank ({self.purpose}, {doing}): {_first_line(error)}",
            "the rank that failed first says why in its own log",
        )


class Pending:
    """One collective or message under way. Keeps its tensors alive until awaited."""

    def __init__(self, group: Group, work: Any, tensors: tuple[Tensor, ...]) -> None:
        self._group = group
        self._work = work
        self._tensors = tensors

    def wait(self, doing: str) -> None:
        """Block until done. Raises PeerLost when a rank is gone or the group's timeout has passed."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._group.lost(error, doing) from error


_open_groups: weakref.WeakSet[Group] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Let go of all groups while the interpreter still runs; a script that ends by an exception has not.

    gloo's threads need the interpreter once more to give back the tensors of a last collective. Too late for that, they
    end the process with SIGABRT, and the exit code that the exception would have had is lost.
    """
    for group in list(_open_groups):
        group.close()
    if dist.is_available() and dist.is_initialized():
        leaving = threading.Thread(target=dist.destroy_process_group, name="leave", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter takes no new threads any more
            leaving.start()
            leaving.join(LEAVE_SECONDS)
    gc.collect()
    time.sleep(LAST_RELEASE_SECONDS)


def prefixed(prefix: str, store: Store) -> Store:
    """``store`` with all keys under ``prefix``."""
    return distributed_c10d.PrefixStore(prefix, store)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
