"""Notices a peer that is gone, stopped or asleep, on a connection of its own so that bulk data never delays a beat."""

from __future__ import annotations

import socket
import time

INTERVAL_SECONDS = 2.0
SILENCE_SECONDS = 10.0

_BEAT = b"\0"


def beat(sock: socket.socket, interval: float, silence: float) -> str:
    """Send a beat every ``interval`` seconds until nothing was heard for ``silence`` seconds or the connection ends.

    Both sides do the same. Returns why the peer counts as lost. To make it return, shut the socket down.
    """
    heard = due = time.monotonic()
    try:
        while True:
            now = time.monotonic()
            if now - heard >= silence:
                return f"no heartbeat for {silence:g} s"
            if now >= due:
                due = now + interval
                sock.settimeout(silence)
                sock.sendall(_BEAT)
            sock.settimeout(max(0.001, min(due, heard + silence) - time.monotonic()))
            try:
                data = sock.recv(64)
            except TimeoutError:
                continue
            if not data:
                return "the heartbeat connection was closed"
            heard = time.monotonic()
    except OSError as error:
        return f"the heartbeat connection broke ({error.strerror or error})"
