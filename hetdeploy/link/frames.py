"""Messages on a link connection: a 4-byte big-endian length, then that many bytes of JSON, one object in UTF-8."""

from __future__ import annotations

import json
import socket
import time
from typing import Any, NoReturn

from hetdeploy.errors import HetdeployError

LIMIT_BEFORE_AUTHENTICATION = 4 * 1024
"""Bytes of JSON that a stranger may make us hold."""

LIMIT = 1024 * 1024
"""Bytes of JSON in a frame of somebody known."""

_LENGTH_BYTES = 4


class FrameError(HetdeployError):
    """What arrived is not a frame, or not one of a size that is allowed."""


def encode(message: dict[str, Any], limit: int = LIMIT) -> bytes:
    """One frame. Raises FrameError if the message is over ``limit`` bytes as JSON."""
    body = json.dumps(message, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > limit:
        raise FrameError(f"a message of {len(body)} bytes is over the limit of {limit}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def decode(body: bytes | bytearray) -> dict[str, Any]:
    """The object in a frame's body. Raises FrameError for anything but one JSON object of proper text."""
    try:
        message = json.loads(body.decode(), parse_constant=_refuse)
        # Escapes can smuggle in half a surrogate pair, on which every later write of that text would fail.
        if b"\\u" in body:
            json.dumps(message, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame is not JSON in UTF-8 ({type(error).__name__})") from error
    if not isinstance(message, dict):
        raise FrameError(f"a frame holds a JSON {type(message).__name__} and not an object")
    return message


class FrameReader:
    """Takes a stream apart into messages. Holds no more than one frame of ``limit`` bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._held = bytearray()

    def feed(self, data: memoryview) -> list[dict[str, Any]]:
        """The messages that ``data`` completes. Raises FrameError; the stream is then beyond use."""
        self._held += data
        messages = []
        start = 0
        while len(self._held) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            length = _checked_length(self._held[start:body], self._limit)
            if len(self._held) - body < length:
                break
            messages.append(decode(self._held[body : body + length]))
            start = body + length
        del self._held[:start]
        return messages


def send(sock: socket.socket, message: dict[str, Any], deadline: float) -> None:
    """Send one frame on a blocking socket, before ``deadline`` (time.monotonic()) or TimeoutError."""
    sock.settimeout(remaining(deadline))
    sock.sendall(encode(message))


def receive(sock: socket.socket, limit: int, deadline: float) -> dict[str, Any]:
    """Receive one frame from a blocking socket and not a byte more.

    Raises FrameError; ConnectionError if the peer closes first; TimeoutError at ``deadline`` (time.monotonic()),
    however slowly the bytes trickle in; OSError.
    """
    length = _checked_length(_exactly(sock, _LENGTH_BYTES, deadline), limit)
    return decode(_exactly(sock, length, deadline))


def remaining(deadline: float) -> float:
    """Seconds until ``deadline`` (time.monotonic()). Raises TimeoutError when there are none left."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def _checked_length(prefix: bytes | bytearray, limit: int) -> int:
    length = int.from_bytes(prefix, "big")
    if not 0 < length <= limit:
        raise FrameError(f"a frame announces {length} bytes, {limit} are allowed")
    return length


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    filled = 0
    while filled < count:
        sock.settimeout(remaining(deadline))
        received = sock.recv_into(view[filled:])
        if not received:
            raise ConnectionError(
                "the connection was closed" if filled == 0 else "the connection was closed in a frame"
            )
        filled += received
    return data


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
