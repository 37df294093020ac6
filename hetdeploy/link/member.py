"""What the server keeps of a peer that it knows, and whom it asks about it."""

from __future__ import annotations

import secrets
import ssl
import threading
from pathlib import Path
from typing import Any, Protocol

from hetdeploy.link.channel import Channel
from hetdeploy.link.interrupt import Breaker

KEY_BYTES = 32


class Member:
    """A session: one control connection, its heartbeat, and the streams and files that go with it."""

    def __init__(
        self, role: str, hello: dict[str, Any], peer: str, welcome: dict[str, Any], control: ssl.SSLSocket
    ) -> None:
        self.session = secrets.token_hex(16)
        self.role = role
        self.hello = hello
        """What the peer told of itself."""
        self.peer = peer
        """Where it comes from, "address:port"."""
        self.welcome = welcome
        """What it was told."""
        self.said_goodbye = False
        """Whether it left by itself; known when ``lost`` is called."""
        self.key = secrets.token_bytes(KEY_BYTES)
        self.channel = Channel(control)
        self.breaker = Breaker()
        self.beating = threading.Event()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; never waits. To one who has gone it is dropped; one who takes none any more is cut off.

        Raises FrameError for a message that is too large.
        """
        if not self.channel.send(message) and not self.channel.is_over:
            self.channel.abort("it does not take its messages")

    def close(self, reason: str) -> None:
        """Say goodbye, once all that was sent is delivered; then end the session."""
        self.channel.close(reason)

    def cut(self, reason: str) -> None:
        """End streams, heartbeat and control connection at once."""
        self.breaker.trip(reason)
        self.channel.abort(reason)

    def __repr__(self) -> str:
        return f"Member({self.role} at {self.peer})"


class Handler(Protocol):
    """What the server asks and tells, from its connections' threads; admit and connected for one member at a time."""

    def admit(self, role: str, hello: dict[str, Any], peer: str) -> dict[str, Any]:
        """The welcome for somebody who knows the code. Raises Refused."""

    def connected(self, member: Member) -> None:
        """It has been welcomed and its heart beats. Comes before any message of it, and before the next admit."""

    def message(self, member: Member, msg: dict[str, Any]) -> None:
        """A message, in the order of sending. While this works the member's next ones wait."""

    def lost(self, member: Member, reason: str) -> None:
        """The session is over. Comes last and once for each connected member; member.said_goodbye tells how it went."""

    def dial_address(self, member: Member, host: str, port: int) -> tuple[str, int]:
        """Where a stream to host:port leads. Raises Refused for what is none of the member's business."""

    def meeting(self, member: Member, name: str) -> Member:
        """The joiner ``name``, whom ``member`` wants to reach. Raises Refused."""

    def file(self, member: Member, digest: str) -> Path:
        """Where the file with this SHA-256 (hex) lies. Raises Refused."""
