"""Join codes, and what is said of those that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetdeploy.errors import UsageError, VersionMismatch
from hetdeploy.link.invitation import Invitation

SECRET = bytes(range(16))
PIN = bytes(range(100, 116))
CODE = Invitation("10.77.0.1", 29400, SECRET, PIN, 1_800_000_000).encode()

invitations = st.builds(
    Invitation,
    st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z]([a-z0-9-]{0,40})(\.local)?", fullmatch=True)),
    st.integers(1, 65535),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
)


@given(invitations)
def test_a_code_says_what_was_put_into_it(invitation: Invitation) -> None:
    assert Invitation.decode(invitation.encode()) == invitation


def test_an_ipv4_code_is_short_and_safe_to_paste_into_any_shell() -> None:
    assert len(CODE) == 67
    assert CODE.startswith("hd1-")
    assert CODE.replace("-", "").replace("_", "").isalnum()


def test_a_scoped_ipv6_address_keeps_its_scope() -> None:
    invitation = Invitation("fe80::1%en0", 29400, SECRET, PIN)
    assert Invitation.decode(invitation.encode()).host == "fe80::1%en0"


def test_line_breaks_and_spaces_do_not_matter() -> None:
    assert Invitation.decode(f"  {CODE[:30]}\n   {CODE[30:]}\r\n") == Invitation.decode(CODE)


@pytest.mark.parametrize("length", range(len("hd1-"), len(CODE)))
def test_every_truncation_is_recognised(length: int) -> None:
    with pytest.raises(UsageError, match="cut short"):
        Invitation.decode(CODE[:length])


@given(st.integers(len("hd1-"), len(CODE) - 1), st.sampled_from("ABCxyz059-_"))
def test_every_altered_letter_is_recognised(position: int, letter: str) -> None:
    if CODE[position] == letter:
        return
    with pytest.raises(UsageError, match=r"altered|cut short|attached"):
        Invitation.decode(CODE[:position] + letter + CODE[position + 1 :])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        ("hello", "not a join code"),
        ("HD1-" + CODE[4:], "not a join code"),
        (CODE + "AAAA", "attached"),
        (CODE[:20] + "$" + CODE[21:], r"'\$' cannot be part"),
        (CODE[:20] + "ü" + CODE[21:], "cannot be part"),
        ("hd1-AAAAA", "cut short"),
    ],
)
def test_what_is_wrong_is_named(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as raised:
        Invitation.decode(text)
    assert "hetdeploy code" in str(raised.value)


def test_a_code_of_another_format_is_a_version_mismatch() -> None:
    with pytest.raises(VersionMismatch, match="hd2"):
        Invitation.decode("hd2-" + CODE[4:])


@given(st.text())
def test_any_text_gets_a_clear_answer(text: str) -> None:
    with pytest.raises((UsageError, VersionMismatch)):
        Invitation.decode(text)
    with pytest.raises(UsageError):
        Invitation.decode("hd1-" + text)


def test_the_secret_is_never_shown() -> None:
    invitation = Invitation.decode(CODE)
    assert SECRET.hex() not in repr(invitation)
    assert repr(SECRET) not in repr(invitation)
    assert "10.77.0.1" in repr(invitation)
    with pytest.raises(UsageError) as raised:
        Invitation.decode(CODE[:-1])
    assert CODE[10:30] not in str(raised.value)
