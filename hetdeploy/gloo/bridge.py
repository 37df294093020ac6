"""The bridge of a joiner: it dials both gloos of a pair, its own rank's and the peer's, and carries messages between.

Both gloos are told an address that compares above their own, so both listen (record.py, store.py); here both are
dialled, each with the greeting it expects. Between the legs the messages pass, their headers rewritten where the
dialects differ (wire.py). Lives in the member process: the ranks' own interpreters are busy training.

Two joiners that meet: neither can be dialled from outside, but joiners reach each other over the link. The higher rank
dials ``node:NAME`` and says which offer it wants; the lower rank's bridge is handed the connection (``meet``), opens
its own leg, and between the two bridges the ``tcp`` dialect is spoken. Ranks of one machine share a bridge: it connects
their gloos with each other.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetdeploy.errors import HetdeployError, PeerUnreachable
from hetdeploy.gloo.address import SockAddr
from hetdeploy.gloo.control import LONGEST_LINE, decode, encode
from hetdeploy.gloo.dialect import Dialect
from hetdeploy.gloo.wire import Codec, codecs, greeting
from hetdeploy.link.endpoint import close_with_reset
from hetdeploy.link.interrupt import Breaker, hang_up
from hetdeploy.link.listener import Listener
from hetdeploy.link.relay import Outcome, Relay

Dial = Callable[[str, int], socket.socket]

LOCAL_TIMEOUT = 10.0
"""Seconds to reach a gloo of this machine, which listens before it publishes."""

MEETING_TIMEOUT = 45.0
"""Seconds for another joiner's rank, whose record is already in the store, to dial this one."""

PREAMBLE_TIMEOUT = 20.0
"""Seconds for the other bridge to say which rank it wants, or to open its leg and answer."""

LONGEST_PREAMBLE = 4096
"""Bytes of the line that comes first on a connection between two joiners."""

CLOSE_TIMEOUT = 5.0
"""Seconds for everything to end."""

MOST_PROBLEMS = 200
LONGEST_SOCKET_PATH = 103
"""Bytes: sun_path of macOS holds 104 with the terminating zero."""

MEETING_PREFIX = "node:"
MEETING_PORT = 0
"""``dial(MEETING_PREFIX + name, MEETING_PORT)`` must end at ``meet`` of the bridge of joiner ``name``."""

FULL_SECONDS = 0.2
"""Pause after a connection that could not be taken for want of descriptors."""

LOOPBACK = "127.0.0.1"

_log = logging.getLogger("hetdeploy.gloo")


class BridgeService:
    """The bridge of one joiner, all its ranks and groups.

    ``dial(host, port)`` opens a connection to an address near the head, or to ``node:NAME``; it may raise OSError or
    HetdeployError. ``dialect`` is what the ranks of this machine speak. ``folder`` receives the control socket (None: a
    fresh one that only this user can enter). ``node`` is the name under which other joiners reach this one.
    """

    def __init__(self, dial: Dial, dialect: Dialect, folder: Path | None = None, node: str = "") -> None:
        self.dialect = dialect
        self.node = node or socket.gethostname()
        self.problems: deque[str] = deque(maxlen=MOST_PROBLEMS)
        self._dial = dial
        self._own_folder = folder is None
        # Not the user's TMPDIR: on macOS that alone fills most of a socket path.
        self._folder = Path(tempfile.mkdtemp(prefix="hetdeploy-", dir="/tmp")) if folder is None else folder
        self._offers: dict[str, _Offer] = {}
        self._forwards: dict[tuple[str, int], Listener] = {}
        self._lock = threading.Lock()
        self._breaker = Breaker()
        self._threads: set[threading.Thread] = set()

    @property
    def path(self) -> Path:
        """The control socket, for HETDEPLOY_BRIDGE."""
        return self._folder / "bridge"

    def start(self) -> None:
        """Listen on ``path``. Raises HetdeployError where it cannot be a socket."""
        if len(str(self.path).encode()) > LONGEST_SOCKET_PATH:
            raise HetdeployError(
                f"the path of the bridge's socket is too long: {self.path}", "use a folder nearer to /"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.path))
        listener.listen()
        self._spawn("bridge", self._accept, listener)

    def close(self) -> None:
        """Stop listening, reset every pair and join the threads, for CLOSE_TIMEOUT at most."""
        self._breaker.trip("the bridge is closing")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(str(self.path))  # nothing else wakes a thread from accept() on every system
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for listener in self._forwards.values():
            listener.stop()
            listener.join(max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)

    def meet(self, sock: socket.socket) -> None:
        """Take a connection that another joiner's bridge dialled as ``node:NAME``; it is closed if this fails.

        Returns once messages flow. Raises PeerUnreachable where the rank that is asked for is not to be had.
        """
        try:
            sock.settimeout(PREAMBLE_TIMEOUT)
            wish = decode(_read_line(sock))
            peer = int(wish.get("rank", -1))
            offer = self._offers.get(str(wish.get("token")))
            if offer is None or peer not in offer.peers or offer.arrivals[peer].is_set():
                raise PeerUnreachable(f"no rank of {self.node} awaits rank {peer} (any more)")
            near = self._open_local(offer, peer)
            try:
                sock.sendall(encode({"ok": True}))
            except OSError:
                near.close()
                raise
            self._carry(offer, peer, near, sock, Dialect.TCP, f"rank {peer} on {wish.get('node')}")
        except (OSError, HetdeployError, ValueError, TypeError) as error:
            with contextlib.suppress(OSError):
                sock.sendall(encode({"ok": False, "problem": str(error)}))
            sock.close()
            raise PeerUnreachable(f"a meeting with another joiner failed: {error}") from None
        offer.met(peer)

    # -- requests of ranks

    def _serve(self, client: socket.socket) -> None:
        """Answer one rank until it hangs up; what it offered goes with it."""
        tokens: set[str] = set()
        try:
            with client, client.makefile("rb") as lines, self._breaker.guard(lambda reason: hang_up(client)):
                while line := lines.readline(LONGEST_LINE):
                    client.sendall(encode(self._reply(line, tokens)))
        except OSError as error:
            _log.info("a rank's connection to the bridge broke: %s", error)
        finally:
            for token in tokens:
                self._offers.pop(token, None)

    def _reply(self, line: bytes, tokens: set[str]) -> dict[str, Any]:
        try:
            return {"ok": True, **self._answer(decode(line), tokens)}
        except HetdeployError as error:
            return {"ok": False, "problem": error.problem, "fix": error.fix}
        except OSError as error:
            return {"ok": False, "problem": str(error)}
        except (KeyError, ValueError, TypeError) as error:
            return {"ok": False, "problem": f"the bridge cannot read a request of a rank: {error!r}"}

    def _answer(self, request: dict[str, Any], tokens: set[str]) -> dict[str, Any]:
        operation = request["op"]
        if operation == "forward":
            return {"port": self._forward(str(request["host"]), int(request["port"]))}
        if operation == "offer":
            offer = _Offer(str(request["token"]), int(request["rank"]), int(request["size"]), _peers(request["peers"]))
            tokens.add(offer.token)
            self._offers[offer.token] = offer
            return {"node": self.node}
        offer = self._offers[request["token"]]
        peer = int(request["peer"])
        if operation == "connect":
            self._connect(offer, peer, SockAddr(request["host"], int(request["port"])), int(request["sequence"]))
        elif operation == "meet":
            self._dial_joiner(offer, peer, str(request["node"]), str(request["peer_token"]))
        elif operation == "await":
            self._await(offer, peer, str(request["node"]))
        else:
            raise HetdeployError(f"the bridge knows no request {operation!r}", "run one hetdeploy on this machine")
        return {}

    def _connect(self, offer: _Offer, peer: int, address: SockAddr, sequence: int) -> None:
        """Join a local rank with one that listens plainly in the ``tcp`` dialect."""
        far = self._reach(offer, peer, address.dialled, address.port)
        try:
            far.sendall(greeting(Dialect.TCP, sequence))
            near = self._open_local(offer, peer)
        except (OSError, HetdeployError):
            far.close()
            raise
        self._carry(offer, peer, near, far, Dialect.TCP, f"rank {peer} at {address}")

    def _dial_joiner(self, offer: _Offer, peer: int, node: str, peer_token: str) -> None:
        neighbour = self._offers.get(peer_token)
        if neighbour is not None:
            near = self._open_local(offer, peer)
            try:
                far = self._open_local(neighbour, offer.rank)
            except (OSError, HetdeployError):
                near.close()
                raise
            self._carry(offer, peer, near, far, self.dialect, f"rank {peer} (this machine)")
            neighbour.met(offer.rank)
            return
        if node == self.node:
            raise PeerUnreachable(f"the record of rank {peer} on this machine is of a group that is gone")
        far = self._reach(offer, peer, MEETING_PREFIX + node, MEETING_PORT)
        try:
            far.settimeout(PREAMBLE_TIMEOUT)
            far.sendall(encode({"token": peer_token, "rank": offer.rank, "node": self.node}))
            answer = decode(_read_line(far))
            if not answer.get("ok"):
                raise PeerUnreachable(
                    f"{node} does not let rank {offer.rank} meet rank {peer}: {answer.get('problem')}"
                )
            near = self._open_local(offer, peer)
        except (OSError, HetdeployError):
            far.close()
            raise
        self._carry(offer, peer, near, far, Dialect.TCP, f"rank {peer} on {node}")

    def _await(self, offer: _Offer, peer: int, node: str) -> None:
        arrival = offer.arrivals[peer]
        with self._breaker.guard(lambda reason: arrival.set()):
            arrived = arrival.wait(MEETING_TIMEOUT)
        if self._breaker.tripped:
            raise PeerUnreachable(f"{self._breaker.tripped}, before rank {peer} on {node} dialled rank {offer.rank}")
        if not arrived:
            raise PeerUnreachable(
                f"rank {peer} on {node} is there but did not dial rank {offer.rank} within {MEETING_TIMEOUT:g} s",
                f"see the last lines of `hetdeploy join` on {node}",
            )

    # -- legs

    def _reach(self, offer: _Offer, peer: int, host: str, port: int) -> socket.socket:
        try:
            return self._dial(host, port)
        except (OSError, HetdeployError) as error:
            problem, fix = (error.problem, error.fix) if isinstance(error, HetdeployError) else (str(error), None)
            raise PeerUnreachable(
                f"rank {offer.rank} cannot reach rank {peer} at {host} port {port} (group of {offer.size}): {problem}",
                fix or f"rank {peer} has probably ended: read its log; if it runs, check with `hetdeploy doctor`",
            ) from None

    def _open_local(self, offer: _Offer, peer: int) -> socket.socket:
        address, sequence = offer.peers[peer]
        try:
            near = socket.create_connection((address.dialled, address.port), timeout=LOCAL_TIMEOUT)
        except OSError as error:
            raise PeerUnreachable(
                f"the gloo of rank {offer.rank} on this machine does not take a connection at {address}: {error}",
                "GLOO_SOCKET_IFNAME must be this machine's loopback interface, as `hetdeploy join` sets it",
            ) from None
        try:
            near.sendall(greeting(self.dialect, sequence))
        except (OSError, HetdeployError):
            near.close()
            raise
        return near

    def _carry(
        self, offer: _Offer, peer: int, near: socket.socket, far: socket.socket, dialect: Dialect, far_name: str
    ) -> None:
        near_name = f"rank {offer.rank} (this machine)"
        directions = codecs(self.dialect, dialect, near_name, far_name)
        pair = f"pair {near_name}, {far_name}, group of {offer.size}"
        self._spawn(pair, self._run, pair, _relay(near, far, *directions), directions)

    def _run(self, pair: str, carrier: Relay, directions: tuple[Codec, Codec]) -> None:
        """Carry a pair to its end, and say what ended it if that was not in order.

        It is said before the ranks can feel it: they may be gone a moment later, and the bridge with them.
        """

        def report(outcome: Outcome) -> None:
            if self._breaker.tripped or outcome.reason is None:
                return
            if outcome.error is None and not any(direction.in_message for direction in directions):
                # A reset between messages is how gloo takes leave.
                _log.info("%s: %s", pair, outcome.reason)
                return
            problem = f"{pair}: {outcome.reason}; both sides are cut"
            self.problems.append(problem)
            _log.error("%s", problem)

        with self._breaker.guard(carrier.abort):
            carrier.run(report)

    # -- forwards

    def _forward(self, host: str, port: int) -> int:
        """A port of the loopback interface that leads to ``host:port``; the same one for every rank that asks."""
        with self._lock:
            listener = self._forwards.get((host, port))
            if listener is None:
                name = f"forward-{host}:{port}"
                listener = Listener((LOOPBACK, 0), name, lambda near, peer: self._pass(near, host, port))
                listener.start()
                self._forwards[host, port] = listener
        return listener.port

    def _pass(self, near: socket.socket, host: str, port: int) -> None:
        try:
            carrier = _relay(near, self._dial(host, port))
        except (OSError, HetdeployError) as error:
            close_with_reset(near)
            self.problems.append(f"no connection to the store at {host}:{port}: {error}")
            _log.error("%s", self.problems[-1])
            return
        with self._breaker.guard(carrier.abort):
            carrier.run()

    # -- threads

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError as error:
                    _log.warning("the bridge cannot take a rank's connection at the moment: %s", error)
                    time.sleep(FULL_SECONDS)
                    continue
                if self._breaker.tripped:
                    client.close()
                    return
                self._spawn("client", self._serve, client)

    def _spawn(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        with self._lock:
            self._threads = {other for other in self._threads if other.is_alive()} | {thread}
            thread.start()


@dataclass
class _Offer:
    """A rank of this machine in one group: where its gloo listens for each peer, and the number to greet with.

    Ranks are those within the group; its name is in prefixes of the store that nobody can ask for.
    """

    token: str
    rank: int
    size: int
    peers: dict[int, tuple[SockAddr, int]]
    arrivals: dict[int, threading.Event] = field(init=False)

    def __post_init__(self) -> None:
        self.arrivals = {peer: threading.Event() for peer in self.peers}

    def met(self, peer: int) -> None:
        self.arrivals[peer].set()


def _peers(fields: dict[str, list[Any]]) -> dict[int, tuple[SockAddr, int]]:
    return {
        int(peer): (SockAddr(str(host), int(port), int(scope)), int(sequence))
        for peer, (host, port, scope, sequence) in fields.items()
    }


def _relay(near: socket.socket, far: socket.socket, *directions: Codec) -> Relay:
    """Closes both if there are no descriptors left for it."""
    try:
        return Relay(near, far, *directions)
    except OSError:
        near.close()
        far.close()
        raise


def _read_line(sock: socket.socket) -> bytes:
    """One line and not a byte more: messages follow on the same connection."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > LONGEST_PREAMBLE:
            raise PeerUnreachable("the other joiner's bridge closed the connection before it said what it wants")
        line += byte
    return bytes(line)
