"""The join code: all that a joiner needs to reach the head and to be sure of it, as one word to paste.

``hd1-`` and then, in URL-safe base64 without padding:

    host kind   1 byte    4 or 6: an address of 4 or 16 bytes follows; 0: one byte of length and a name in UTF-8
    host
    port        2 bytes   big-endian, as all numbers here
    expires     4 bytes   Unix seconds, 0 for never
    secret      16 bytes
    pin         16 bytes  start of the SHA-256 of the head's certificate (DER)
    checksum    4 bytes   start of the SHA-256 of all before it; against slips of hand, not against forgers
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re
import struct
from dataclasses import dataclass, field

from hetdeploy.errors import UsageError, VersionMismatch

PREFIX = "hd1-"
SECRET_BYTES = 16
PIN_BYTES = 16

_NAME_KIND = 0
_ADDRESS_BYTES = {4: 4, 6: 16}
_CHECKSUM_BYTES = 4
_AFTER_HOST = struct.Struct(f">HI{SECRET_BYTES}s{PIN_BYTES}s")
_FIX = "copy the whole line that `hetdeploy up` printed on the head, or `hetdeploy code` there"


@dataclass(frozen=True)
class Invitation:
    """What a join code says."""

    host: str
    """Address literal or name of the head."""
    port: int
    secret: bytes = field(repr=False)
    pin: bytes
    expires: int = 0
    """Unix seconds; 0 for never."""

    def encode(self) -> str:
        """The join code."""
        body = _encode_host(self.host) + _AFTER_HOST.pack(self.port, self.expires, self.secret, self.pin)
        return PREFIX + _encode_base64(body + _checksum(body))

    @classmethod
    def decode(cls, text: str) -> Invitation:
        """Read a join code; white space in it (a terminal's line break) does not matter.

        Raises UsageError saying what is wrong with the text, VersionMismatch for a code of another format. The text
        itself is never repeated: it holds a secret.
        """
        word = "".join(text.split())
        if not word.startswith(PREFIX):
            raise _not_a_code(word)
        data = _decode_base64(word.removeprefix(PREFIX))
        host_bytes = _host_bytes(data)
        if host_bytes is None or len(data) < host_bytes + _AFTER_HOST.size + _CHECKSUM_BYTES:
            raise UsageError(f"the join code is cut short (it has {len(word)} characters)", _FIX)
        if _encode_base64(data) != word.removeprefix(PREFIX):  # the last letter has bits that no byte uses
            raise UsageError("the join code is altered (its last letter is wrong)", _FIX)
        body, checksum = data[: host_bytes + _AFTER_HOST.size], data[host_bytes + _AFTER_HOST.size :]
        if len(checksum) > _CHECKSUM_BYTES:
            raise UsageError("the join code has something attached at its end", _FIX)
        if checksum != _checksum(body):
            raise UsageError("the join code is altered (its checksum does not fit)", _FIX)
        port, expires, secret, pin = _AFTER_HOST.unpack(body[host_bytes:])
        return cls(_decode_host(body[:host_bytes]), port, secret, pin, expires)


def _not_a_code(word: str) -> UsageError | VersionMismatch:
    if not word:
        return UsageError("the join code is empty", _FIX)
    if re.match(r"hd\d+-", word):
        return VersionMismatch(
            f"the join code has the format {word.split('-')[0]}, this hetdeploy reads {PREFIX[:-1]}",
            "install the same hetdeploy on both machines",
        )
    return UsageError(f"that is not a join code (one begins with {PREFIX})", _FIX)


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_base64(text: str) -> bytes:
    if odd := re.search(r"[^A-Za-z0-9_-]", text):
        raise UsageError(f"the join code is altered ({odd.group()!r} cannot be part of one)", _FIX)
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:  # a length that no encoding has
        raise UsageError("the join code is cut short or altered", _FIX) from error


def _encode_host(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None or "%" in host:  # the packed form has no room for a scope
        name = host.encode()
        return bytes((_NAME_KIND, len(name))) + name
    return bytes((address.version,)) + address.packed


def _host_bytes(data: bytes) -> int | None:
    """Length of the host field with its kind; None if too little of it is there."""
    if not data:
        return None
    if data[0] in _ADDRESS_BYTES:
        return 1 + _ADDRESS_BYTES[data[0]]
    if data[0] != _NAME_KIND:
        raise UsageError("the join code is altered (its first letters are wrong)", _FIX)
    return 2 + data[1] if len(data) > 1 else None


def _decode_host(field: bytes) -> str:
    if field[0] != _NAME_KIND:
        return str(ipaddress.ip_address(field[1:]))
    try:
        return field[2:].decode()
    except UnicodeDecodeError as error:
        raise UsageError("the join code is altered (the head's name in it is no text)", _FIX) from error


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]
