"""What a rank asks of the bridge in its machine's member process: one JSON object a line, over a Unix socket.

A request is {"op": name, ...}; the answer is {"ok": true, ...} or {"ok": false, "problem": text, "fix": text}. What a
connection offered is forgotten when it closes, so a rank keeps it open while its group forms.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from hetdeploy.errors import HetdeployError, PeerUnreachable

LONGEST_LINE = 1 << 20
"""Bytes. An offer carries an address per rank; this holds thousands."""

ANSWER_TIMEOUT = 60.0
"""Seconds. The bridge bounds its own work (dialling, meeting) well below."""


class BridgeClient:
    """One connection of a rank to its bridge; requests are answered one after another.

    Raises PeerUnreachable where the bridge is gone.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_TIMEOUT)
            self._socket.connect(self._path)
        except OSError as error:
            self._socket.close()
            raise self._gone(error) from None
        self._lines = self._socket.makefile("rb")

    def request(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask and wait for the answer, at most ANSWER_TIMEOUT. Raises PeerUnreachable with what the bridge answered."""
        try:
            self._socket.sendall(encode({"op": op, **fields}))
            line = self._lines.readline(LONGEST_LINE)
        except OSError as error:
            raise self._gone(error) from None
        if not line.endswith(b"\n"):
            raise self._gone("it closed the connection")
        answer = decode(line)
        if not answer.get("ok"):
            raise PeerUnreachable(str(answer.get("problem", "the bridge refused")), answer.get("fix"))
        return answer

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _gone(self, reason: object) -> PeerUnreachable:
        return PeerUnreachable(
            f"the bridge of this machine does not answer at {self._path} ({reason})",
            "`hetdeploy join` must run for as long as its ranks do: see its last lines",
        )


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Raises HetdeployError for anything but a JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise HetdeployError(f"a line between rank and bridge is no JSON ({error})") from None
    if not isinstance(message, dict):
        raise HetdeployError("a line between rank and bridge is no JSON object")
    return message
