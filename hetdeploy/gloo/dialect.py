"""Which of gloo's two wire protocols a machine speaks, and how its kernel lays out a socket address.

torch's Linux wheels hold gloo's ``tcp`` transport alone and its macOS wheels ``uv`` alone (pytorch/pytorch#144851), so
the platform decides both. Tests and the self-test override them through the environment.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping
from typing import TypeVar

from hetdeploy.errors import HetdeployError, UsageError

_E = TypeVar("_E", bound=enum.Enum)

DIALECT_VARIABLE = "HETDEPLOY_DIALECT"
LAYOUT_VARIABLE = "HETDEPLOY_SOCKADDR"


class Dialect(enum.Enum):
    """A gloo transport: what its store records, greetings and message headers look like."""

    TCP = "tcp"
    UV = "uv"

    @property
    def platform(self) -> str:
        return "Linux" if self is Dialect.TCP else "macOS"


class Layout(enum.Enum):
    """How ``struct sockaddr`` begins: a 16-bit family (Linux), or a length byte and a family byte (macOS)."""

    LINUX = "linux"
    DARWIN = "darwin"


class GlooProtocolError(HetdeployError):
    """Bytes that are not what the gloo of torch 2.13 writes: a record, a greeting or a message header."""


def dialect_here(environ: Mapping[str, str] = os.environ) -> Dialect:
    """The dialect of this machine's torch. Raises UsageError where the override names none."""
    return _choice(Dialect, environ, DIALECT_VARIABLE, Dialect.UV if sys.platform == "darwin" else Dialect.TCP)


def layout_here(environ: Mapping[str, str] = os.environ) -> Layout:
    """The socket address layout of this machine. Raises UsageError where the override names none."""
    return _choice(Layout, environ, LAYOUT_VARIABLE, Layout.DARWIN if sys.platform == "darwin" else Layout.LINUX)


def _choice(kind: type[_E], environ: Mapping[str, str], variable: str, default: _E) -> _E:
    text = environ.get(variable, "")
    if not text:
        return default
    try:
        return kind(text)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise UsageError(
            f"{variable}={text} is not one of {known}", f"unset {variable}; the platform decides"
        ) from None
