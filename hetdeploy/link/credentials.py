"""What the head is known by, and whom it lets in: one folder with a certificate, its key and the secrets of the codes.

    cert.pem, key.pem   self-signed, made fresh by create(); joiners know it by its pin, so it needs no authority
    secrets.json        {"joiner": {"secret", "expires"}, "head": {"secret"}, "rotated": [key id, ...]}

A secret is never sent: whoever knows it names it by its key id, a digest, and proves it with an HMAC (handshake.py).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import ssl
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from hetdeploy.errors import HetdeployError, UsageError
from hetdeploy.files import write_atomic
from hetdeploy.link.invitation import PIN_BYTES, SECRET_BYTES, Invitation

JOINER = "joiner"
HEAD = "head"

REMEMBERED_CODES = 64
"""So many codes back, a joiner is told that its code was rotated and not that it is wrong."""

_CERTIFICATE_DAYS = 3650
_KEY_ID_BYTES = 8


class Verdict(Enum):
    """What a proof is worth."""

    GOOD = "good"
    WRONG = "secret"
    EXPIRED = "expired"
    ROTATED = "rotated"


@dataclass(frozen=True)
class Credentials:
    """The head's certificate and the codes that are good at present."""

    folder: Path
    joiner_secret: bytes
    joiner_expires: int
    """Unix seconds; 0 for never."""
    head_secret: bytes
    rotated: tuple[str, ...]
    """Key ids of the joiner secrets of before, the latest last."""

    @classmethod
    def create(cls, folder: Path, ttl_seconds: int) -> Credentials:
        """Fresh certificate, key and secrets in ``folder``; every code given out before is void."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        certificate, key = _self_signed()
        write_atomic(folder / "key.pem", key)
        write_atomic(folder / "cert.pem", certificate)
        return cls(folder, _fresh(), _expiry(ttl_seconds), _fresh(), ())._save()

    @classmethod
    def load(cls, folder: Path) -> Credentials:
        """Read what create() left. Raises UsageError if it is not there, HetdeployError if it is damaged."""
        path = folder / "secrets.json"
        try:
            content: dict[str, Any] = json.loads(path.read_bytes())
            joiner, head = content[JOINER], content[HEAD]
            return cls(
                folder,
                _secret(joiner),
                int(joiner["expires"]),
                _secret(head),
                tuple(str(key) for key in content["rotated"]),
            )
        except FileNotFoundError as error:
            raise UsageError(
                f"there are no join codes ({path} is missing)", "start a job with `hetdeploy up`"
            ) from error
        except OSError as error:
            raise HetdeployError(f"{path} cannot be read ({error.strerror})", "see to its permissions") from error
        except (ValueError, KeyError, TypeError) as error:
            raise HetdeployError(f"{path} is damaged", "run `hetdeploy down` and `hetdeploy up`") from error

    def rotate(self, ttl_seconds: int) -> Credentials:
        """Give joiners a new secret; members already in are not disturbed, the old code lets nobody in any more."""
        rotated = (*self.rotated, key_id(self.joiner_secret))[-REMEMBERED_CODES:]
        return Credentials(self.folder, _fresh(), _expiry(ttl_seconds), self.head_secret, rotated)._save()

    def invitation(self, role: str, host: str, port: int) -> Invitation:
        """The code for a member of this role ("joiner" or "head") to come in by ``host``:``port``."""
        secret, expires = (self.head_secret, 0) if role == HEAD else (self.joiner_secret, self.joiner_expires)
        return Invitation(host, port, secret, self.pin, expires)

    def judge(self, role: str, name: str, proof: bytes, challenge: bytes) -> Verdict:
        """Whether ``proof`` shows knowledge of the secret of ``role`` that is good now; ``name`` is its key id."""
        secret = self.head_secret if role == HEAD else self.joiner_secret
        if not hmac.compare_digest(proof, prove(secret, challenge)):
            return Verdict.ROTATED if role == JOINER and name in self.rotated else Verdict.WRONG
        if role == JOINER and 0 < self.joiner_expires <= time.time():
            return Verdict.EXPIRED
        return Verdict.GOOD

    @property
    def certificate(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def pin(self) -> bytes:
        """What joiners know the certificate by."""
        return pin_of(ssl.PEM_cert_to_DER_cert(self.certificate.read_text(encoding="ascii")))

    def _save(self) -> Credentials:
        content = {
            JOINER: {"secret": self.joiner_secret.hex(), "expires": self.joiner_expires},
            HEAD: {"secret": self.head_secret.hex()},
            "rotated": self.rotated,
        }
        write_atomic(self.folder / "secrets.json", json.dumps(content, indent=1).encode())
        return self

    def __repr__(self) -> str:
        return f"Credentials({self.folder})"


def pin_of(certificate: bytes) -> bytes:
    """Start of the SHA-256 of a certificate (DER)."""
    return hashlib.sha256(certificate).digest()[:PIN_BYTES]


def key_id(secret: bytes) -> str:
    """Names a secret without giving it away."""
    return hashlib.sha256(b"hetdeploy link key id\0" + secret).digest()[:_KEY_ID_BYTES].hex()


def prove(secret: bytes, challenge: bytes) -> bytes:
    """HMAC-SHA256 of what the server asks to have signed."""
    return hmac.digest(secret, challenge, "sha256")


def _secret(entry: dict[str, Any]) -> bytes:
    secret = bytes.fromhex(entry["secret"])
    if len(secret) != SECRET_BYTES:
        raise ValueError("wrong length")
    return secret


def _fresh() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def _expiry(ttl_seconds: int) -> int:
    return int(time.time()) + ttl_seconds if ttl_seconds else 0


def _self_signed() -> tuple[bytes, bytes]:
    """Certificate and key (EC P-256), PEM. Valid since yesterday: clocks may differ, and it is the pin that decides."""
    # Slow to import, and wanted only where codes are made.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hetdeploy head")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_CERTIFICATE_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), private
