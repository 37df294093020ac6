"""The head's certificate and secrets on disk."""

from __future__ import annotations

import json
import ssl
import stat
import time
from pathlib import Path

import pytest

from hetdeploy.errors import HetdeployError, UsageError
from hetdeploy.link.credentials import HEAD, JOINER, REMEMBERED_CODES, Credentials, Verdict, key_id, prove

CHALLENGE = b"nonce and pin and kind"


def judged(credentials: Credentials, secret: bytes, role: str = JOINER) -> Verdict:
    return credentials.judge(role, key_id(secret), prove(secret, CHALLENGE), CHALLENGE)


def test_what_was_created_is_loaded(tmp_path: Path) -> None:
    made = Credentials.create(tmp_path / "link", ttl_seconds=60)
    assert Credentials.load(tmp_path / "link") == made
    assert made.invitation(JOINER, "10.0.0.1", 29400).expires == pytest.approx(time.time() + 60, abs=2)
    assert made.invitation(HEAD, "10.0.0.1", 29400).expires == 0
    assert made.invitation(HEAD, "10.0.0.1", 29400).secret != made.invitation(JOINER, "10.0.0.1", 29400).secret


def test_key_and_secrets_are_their_owners_alone(tmp_path: Path) -> None:
    Credentials.create(tmp_path / "link", 60)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "link").iterdir()}
    assert modes == {"cert.pem": 0o600, "key.pem": 0o600, "secrets.json": 0o600}
    assert stat.S_IMODE((tmp_path / "link").stat().st_mode) == 0o700


def test_each_certificate_is_fresh_and_usable(tmp_path: Path) -> None:
    one, other = Credentials.create(tmp_path / "one", 60), Credentials.create(tmp_path / "other", 60)
    assert one.pin != other.pin
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(one.certificate, one.key)


def test_verdicts(tmp_path: Path) -> None:
    credentials = Credentials.create(tmp_path, 60)
    assert judged(credentials, credentials.joiner_secret) is Verdict.GOOD
    assert judged(credentials, b"x" * 16) is Verdict.WRONG
    assert judged(credentials, credentials.head_secret, HEAD) is Verdict.GOOD
    assert judged(credentials, credentials.joiner_secret, HEAD) is Verdict.WRONG
    assert judged(credentials, credentials.head_secret, JOINER) is Verdict.WRONG
    assert credentials.judge(JOINER, key_id(credentials.joiner_secret), b"", CHALLENGE) is Verdict.WRONG


def test_a_code_expires_and_the_heads_own_does_not(tmp_path: Path) -> None:
    credentials = Credentials.create(tmp_path, ttl_seconds=-1)
    assert judged(credentials, credentials.joiner_secret) is Verdict.EXPIRED
    assert judged(credentials, b"x" * 16) is Verdict.WRONG
    assert judged(credentials, credentials.head_secret, HEAD) is Verdict.GOOD
    assert judged(Credentials.create(tmp_path, ttl_seconds=0), credentials.joiner_secret) is Verdict.WRONG


def test_rotation_keeps_certificate_and_head_and_remembers_old_codes(tmp_path: Path) -> None:
    first = Credentials.create(tmp_path, 60)
    latest = first
    for _ in range(REMEMBERED_CODES):
        latest = latest.rotate(60)
    assert (latest.pin, latest.head_secret) == (first.pin, first.head_secret)
    assert judged(latest, first.joiner_secret) is Verdict.ROTATED
    assert judged(latest.rotate(60), first.joiner_secret) is Verdict.WRONG
    assert judged(Credentials.load(tmp_path), latest.joiner_secret) is Verdict.ROTATED
    assert first.joiner_secret.hex() not in (tmp_path / "secrets.json").read_text()


def test_no_secret_is_shown(tmp_path: Path) -> None:
    credentials = Credentials.create(tmp_path, 60)
    assert credentials.joiner_secret.hex() not in repr(credentials)
    assert repr(credentials.joiner_secret) not in repr(credentials)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no join codes"):
        Credentials.load(tmp_path)
    Credentials.create(tmp_path, 60)
    content = json.loads((tmp_path / "secrets.json").read_text())
    for damage in ("{", "[]", "{}", json.dumps({**content, "joiner": {"secret": "00", "expires": 0}}), "\xff"):
        (tmp_path / "secrets.json").write_text(damage, encoding="latin-1")
        with pytest.raises(HetdeployError, match=r"secrets\.json is damaged"):
            Credentials.load(tmp_path)
