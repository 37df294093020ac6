#!/usr/bin/env python3
"""How fast the relay copies: MB/s over loopback, by kind of socket, and the round trip of a small message.

    python scripts/bench_relay.py [MEGABYTES]

Sender and receiver are processes of their own. On a machine with few cores they share them with the relay, so next to
the wall clock's figure stands what the relay did per second of its own CPU time: what one core can carry.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import ssl
import statistics
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from hetdeploy.link.credentials import Credentials
from hetdeploy.link.relay import Outcome, Relay

CHUNK_BYTES = 1 << 20
PINGS = 5000
PING_BYTES = 64


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    with tempfile.TemporaryDirectory() as folder:
        credentials = Credentials.create(Path(folder), 0)
        print("from   to       MB/s  MB/s of the relay's CPU")
        for left, right in (("plain", "tls"), ("tls", "plain"), ("plain", "plain"), ("tls", "tls")):
            wall, cpu, outcome = run(credentials, (send, left, megabytes), (receive, right, 0))
            print(f"{left:6s} {right:6s} {outcome.left_bytes / wall / 1e6:6.0f} {outcome.left_bytes / cpu / 1e6:6.0f}")
        for left, right in (("plain", "plain"), ("plain", "tls")):
            run(credentials, (ping, left, 0), (pong, right, 0))


def run(credentials: Credentials, *ends: tuple) -> tuple[float, float, Outcome]:
    """Relay between the two ends. Returns seconds by the wall clock, seconds of CPU, and how it went."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(credentials.certificate, credentials.key)
    context.num_tickets = 0
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    sockets: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for work, kind, amount in ends:
            port = listener.getsockname()[1]
            processes.append(spawn.Process(target=peer, args=(work, kind, port, amount)))
            processes[-1].start()
            sock, _ = listener.accept()
            sockets.append(context.wrap_socket(sock, server_side=True) if kind == "tls" else sock)
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    outcome = Relay(*sockets).run()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    for process in processes:
        process.join()
    assert outcome.reason is None, outcome
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, outcome


def peer(work, kind: str, port: int, amount: int) -> None:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        sock = context.wrap_socket(sock)
    work(sock, amount)
    if isinstance(sock, ssl.SSLSocket):
        sock.unwrap()
    sock.close()


def send(sock: socket.socket, megabytes: int) -> None:
    chunk = bytes(CHUNK_BYTES)
    for _ in range(megabytes):
        sock.sendall(chunk)


def receive(sock: socket.socket, _amount: int) -> None:
    buffer = bytearray(CHUNK_BYTES)
    while sock.recv_into(buffer):
        pass


def ping(sock: socket.socket, _amount: int) -> None:
    times = []
    for _ in range(PINGS):
        started = time.perf_counter()
        sock.sendall(bytes(PING_BYTES))
        sock.recv(PING_BYTES)
        times.append(time.perf_counter() - started)
    print(f"round trip of {PING_BYTES} bytes: {statistics.median(times) * 1e6:.0f} us")


def pong(sock: socket.socket, _amount: int) -> None:
    while data := sock.recv(PING_BYTES):
        sock.sendall(data)


if __name__ == "__main__":
    main()
