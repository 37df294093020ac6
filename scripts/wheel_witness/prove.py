"""Shows that a check can fail: changes, in memory, each constant that it found, and asks it again."""

from __future__ import annotations

from typing import NamedTuple

from .checks import Check, Differs, Evidence, Library
from .images import Function, Image


class Proof(NamedTuple):
    """What a check says of a library in which one instruction is off by one bit: None if it noticed nothing."""

    evidence: Evidence
    verdict: str | None


def prove(image: Image, check: Check) -> list[Proof]:
    """One proof for each instruction that the check relies on and that has a constant or a condition to change."""
    library = Library(image)
    proofs = []
    for evidence in check.verify(library):
        spoiled = library.spoil(evidence)
        if spoiled is not None:
            proofs.append(Proof(evidence, _verdict(check, Spoiled(image, evidence.address, spoiled))))
    return proofs


def _verdict(check: Check, image: Image) -> str | None:
    try:
        check.verify(Library(image))
    except Differs as difference:
        return str(difference)
    return None


class Spoiled(Image):
    """An image with some of its code replaced."""

    def __init__(self, image: Image, address: int, code: bytes) -> None:
        self._image = image
        self._address = address
        self._code = code
        self.machine = image.machine
        self.symbols = image.symbols

    def function(self, symbol: str) -> Function:
        function = self._image.function(symbol)
        at = self._address - function.address
        if not 0 <= at < len(function.code):
            return function
        return function._replace(code=function.code[:at] + self._code + function.code[at + len(self._code) :])

    def constant(self, address: int, size: int) -> bytes | None:
        return self._image.constant(address, size)

    def name(self, address: int) -> str | None:
        return self._image.name(address)
