"""One end of a relay: a connected socket, plain or TLS, that is read and written without ever blocking."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
import sys
from collections import deque
from itertools import islice
from selectors import EVENT_READ, EVENT_WRITE

TLS_RECORD_BYTES = 16 * 1024
"""Most plaintext that one TLS record carries (RFC 8446, section 5.1)."""

GATHERED_CHUNKS = 64
"""Chunks handed to one sendmsg; far below every system's IOV_MAX."""

# A dead peer is noticed after 4 + 3 * 2 = 10 s of silence. TCP_USER_TIMEOUT is left alone on purpose: on Linux it also
# ends a connection to a healthy peer that merely has not read for that long (a closed window), which is back pressure.
KEEPALIVE_IDLE_SECONDS = 4
KEEPALIVE_INTERVAL_SECONDS = 2
KEEPALIVE_PROBES = 3


class End:
    """What cannot be done at once names the event to wait for: ``read_event`` or ``write_event``.

    Raises EndFailed when the connection is beyond use; BrokenPipeError when only writing is.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.tls = isinstance(sock, ssl.SSLSocket)
        self.ending = "open"
        self.read_event = EVENT_READ
        self.write_event = EVENT_WRITE
        self._ahead = b""
        self._at_end = False
        self._postponed: OSError | None = None
        self._staging = bytearray(TLS_RECORD_BYTES if self.tls else 0)
        self._farewell: bytes | None = None

    def prepare(self) -> None:
        try:
            tune(self.sock)
            self.sock.setblocking(False)
        except OSError as error:  # macOS refuses options on a connection that is already reset
            raise EndFailed(self, error) from error
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.suppress_ragged_eofs = False  # type: ignore[attr-defined]  # else a cut stream looks complete

    @property
    def readable_now(self) -> bool:
        """Whether the next read has something to report that the kernel knows nothing about."""
        if self._at_end or self._postponed is not None or self._ahead:
            return True
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0

    def read(self, into: memoryview) -> int | None:
        """Bytes put into the buffer; 0 at the end of the stream; None if ``read_event`` has to come first."""
        if self._ahead:
            count = min(len(self._ahead), len(into))
            into[:count], self._ahead = self._ahead[:count], self._ahead[count:]
            return count
        if self._postponed is not None:
            raise EndFailed(self, self._postponed)
        try:
            return self._read_records(into) if self.tls else self.sock.recv_into(into)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EndFailed(self, error) from error

    def _read_records(self, into: memoryview) -> int | None:
        """A TLS read returns one record at most, so one is not enough to keep a fast link busy."""
        filled = 0
        while not self._at_end and filled < len(into):
            try:
                count = self.sock.recv_into(into[filled:])
            except ssl.SSLWantReadError:
                self.read_event = EVENT_READ
                break
            except ssl.SSLWantWriteError:
                self.read_event = EVENT_WRITE
                break
            except ssl.SSLZeroReturnError:  # what OpenSSL says instead of 0 once our own close_notify is out
                count = 0
            except OSError as error:
                if not filled:
                    raise
                self._postponed = error
                break
            self._at_end = count == 0
            filled += count
            if count < TLS_RECORD_BYTES:
                break
        return filled if filled or self._at_end else None

    def write(self, chunks: deque[memoryview]) -> bool:
        """Sends from the front of ``chunks``, taking off what was sent. False if ``write_event`` has to come first."""
        try:
            while chunks:
                if self.tls:
                    self._gather(chunks)
                    _take(chunks, self.sock.send(chunks[0]))
                else:
                    _take(chunks, self.sock.sendmsg(islice(chunks, GATHERED_CHUNKS)))
        except ssl.SSLWantWriteError:
            self.write_event = EVENT_WRITE
            return False
        except ssl.SSLWantReadError:
            self.write_event = EVENT_READ
            return False
        except BlockingIOError:
            return False
        except BrokenPipeError:
            raise
        except OSError as error:
            raise EndFailed(self, error) from error
        return True

    def _gather(self, chunks: deque[memoryview]) -> None:
        """Joins a small chunk with those behind it into one record: a header costs no record, no packet of its own.

        After "want write" OpenSSL insists on being offered the same bytes again, so a gathered front is left as it is
        until it is sent. (Nothing is added to ``chunks`` before it is empty, so a lone front stays alone too.)
        """
        front = chunks[0]
        if len(chunks) == 1 or len(front) >= TLS_RECORD_BYTES or front.obj is self._staging:
            return
        staging = memoryview(self._staging)
        used = 0
        while chunks and used < TLS_RECORD_BYTES:
            chunk = chunks.popleft()
            count = min(len(chunk), TLS_RECORD_BYTES - used)
            staging[used : used + count] = chunk[:count]
            used += count
            if count < len(chunk):
                chunks.appendleft(chunk[count:])
        chunks.appendleft(staging[:used])

    def half_close(self) -> bool:
        """Tells the peer that no more data follows. False if ``write_event`` has to come first."""
        try:
            if isinstance(self.sock, ssl.SSLSocket):
                if self._farewell is None:
                    self._ahead += self.sock.recv(self.sock.pending()) if self.sock.pending() else b""
                    self._farewell = close_notify(self.sock)
                while self._farewell:
                    self._farewell = self._farewell[os.write(self.sock.fileno(), self._farewell) :]
            # Not sock.shutdown: on a TLS socket that drops the TLS state, and reading has to go on.
            socket.socket.shutdown(self.sock, socket.SHUT_WR)
        except BlockingIOError:
            self.write_event = EVENT_WRITE
            return False
        except OSError as error:
            # The peer has gone in the meantime, having sent all it had: nobody is left to be told.
            if error.errno not in (errno.ENOTCONN, errno.EPIPE):
                raise EndFailed(self, error) from error
        return True

    def close(self, *, reset: bool) -> None:
        if reset:
            close_with_reset(self.sock)
        else:
            self.sock.close()


class EndFailed(Exception):
    """An end is beyond use."""

    def __init__(self, end: End, error: OSError) -> None:
        if isinstance(error, ssl.SSLEOFError):
            self.text = "TLS stream cut short"
        else:
            name = errno.errorcode.get(error.errno) if error.errno and not isinstance(error, ssl.SSLError) else None
            self.text = f"{name} ({error.strerror})" if name else str(error)
        super().__init__(self.text)
        self.end = end


def tune(sock: socket.socket) -> None:
    """Sends small messages at once, and has the kernel notice a peer that is gone within 10 s."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, KEEPALIVE_IDLE_SECONDS)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def close_with_reset(sock: socket.socket) -> None:
    """Closes so that the peer sees "connection reset" and not an end of stream; unsent data is dropped."""
    if sock.fileno() >= 0 and sock.family in (socket.AF_INET, socket.AF_INET6):
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError as error:
            if error.errno != errno.EINVAL:  # macOS: the connection is already gone
                raise
    sock.close()


def _take(chunks: deque[memoryview], count: int) -> None:
    """Takes ``count`` bytes off the front."""
    while count:
        front = chunks[0]
        if count < len(front):
            chunks[0] = front[count:]
            return
        count -= len(front)
        chunks.popleft()


def close_notify(sock: ssl.SSLSocket) -> bytes:
    """The encrypted close_notify alert that ends our direction, for the caller to send. Reading can go on afterwards.

    Python offers SSL_shutdown only as unwrap(), which calls it twice, and the second call reads. If the peer is sending
    at that moment OpenSSL calls it "application data after close notify" and the connection is lost. So the descriptor
    stands for an empty socket while unwrap() runs: what it writes is picked up there, and it finds nothing to read.
    Nothing may be pending() in the TLS layer either.
    """
    descriptor = sock.fileno()
    kept = os.dup(descriptor)
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        try:
            os.dup2(far.fileno(), descriptor, inheritable=False)
            sock.unwrap()
        except ssl.SSLWantReadError:
            pass  # sent, and the peer's own close_notify is still to come
        finally:
            os.dup2(kept, descriptor, inheritable=False)
            os.close(kept)
        try:
            return near.recv(TLS_RECORD_BYTES)
        except BlockingIOError:  # it was already sent
            return b""
