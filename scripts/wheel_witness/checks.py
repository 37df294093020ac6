"""What a check is, and how it asks a library's machine code for a constant and reports where it found it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .arm64 import Arm64
from .images import Image
from .trace import Call, Compare, Dialect, Fact, Run, Store, trace
from .values import Value, unknown
from .x86_64 import X86

TRANSPORTS = ("tcp", "uv", "ibverbs")


class Differs(Exception):
    """The library does not do what the bridge relies on, or does it in a way that the check cannot recognise."""


class Evidence(NamedTuple):
    """One thing found: ``what`` it shows, at ``offset`` in ``symbol`` (demangled), and the instruction there."""

    what: str
    symbol: str
    offset: int
    instruction: str
    address: int


@dataclass(frozen=True)
class Check:
    """One constant of one dialect's protocol. ``verify`` returns where it was found, or raises Differs."""

    name: str
    claim: str
    verify: Callable[[Library], list[Evidence]]


@dataclass(frozen=True)
class Result:
    """What a check said of a library: its evidence, or the ``problem``."""

    check: Check
    evidence: list[Evidence]
    problem: str | None = None


class Found(NamedTuple):
    """A number in the code and the address of the instruction that holds it."""

    value: int
    at: int


class Library:
    """An image whose functions are found by pattern and followed once."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.runs: dict[str, Run] = {}
        self._dialect: Dialect = Arm64() if image.machine == "arm64" else X86()

    def follow(self, pattern: str) -> Run:
        """Traces the one function whose mangled name matches ``pattern`` in full. Raises Differs if it is not there."""
        symbol = self.symbol(pattern)
        if symbol is None:
            raise Differs(f"the library has no function {readable(pattern)} (no symbol matches {pattern})")
        if symbol not in self.runs:
            self.runs[symbol] = trace(self.image, self.image.function(symbol), self._dialect)
        return self.runs[symbol]

    def symbol(self, pattern: str) -> str | None:
        """The symbol that matches ``pattern`` in full, or None. Raises Differs when several functions do.

        The parts that compilers split off a function (``.cold``, ``.isra.0``) do not count.
        """
        matcher = re.compile(pattern)
        symbols = self.image.symbols
        found = {symbols[name]: name for name in symbols if "." not in name and matcher.fullmatch(name)}
        if len(found) > 1:
            raise Differs(f"the library has {len(found)} functions {readable(pattern)} (symbols that match {pattern})")
        return next(iter(found.values()), None)

    def spoil(self, evidence: Evidence) -> bytes | None:
        """The instruction that ``evidence`` names, changed so that it says something else; None if it cannot be."""
        for run in self.runs.values():
            if evidence.instruction and evidence.address in run.instructions:
                return self._dialect.spoil(run.instructions[evidence.address])
        return None


def examine(library: Library, checks: Iterable[Check]) -> list[Result]:
    """Asks every check, also after one has failed."""
    results = []
    for check in checks:
        try:
            results.append(Result(check, check.verify(library)))
        except Differs as difference:
            results.append(Result(check, [], str(difference)))
    return results


def transport_only(library: Library, expected: str) -> list[Evidence]:
    """The library holds one gloo transport and no other."""
    counts = {name: _count(library.image, name) for name in TRANSPORTS}
    what = ", ".join(f"{count} symbols of gloo::transport::{name}" for name, count in counts.items())
    if [name for name, count in counts.items() if count] != [expected]:
        raise Differs(f"the library has {what}; the bridge expects {expected} alone")
    return [Evidence(what, f"gloo::transport::{expected}", 0, "", 0)]


def expect(run: Run, what: str, found: Iterable[Found], expected: set[int]) -> list[Evidence]:
    """The numbers found are exactly the expected ones. Raises Differs with the first that is not, or is missing."""
    unique = sorted(set(found), key=lambda finding: finding.at)
    wanted = " and ".join(f"{value:#x}" for value in sorted(expected))
    for value, at in unique:
        if value not in expected:
            raise Differs(f"{what} is {value:#x} at {place(run, at)}; the bridge expects {wanted}")
    missing = expected - {value for value, _ in unique}
    if missing:
        absent = " and ".join(f"{value:#x}" for value in sorted(missing))
        where = readable(run.function.symbol)
        raise Differs(f"{what}: {absent} is not to be found in {where}; the bridge expects {wanted}")
    return [evidence(run, f"{what} is {value:#x}", at) for value, at in unique]


def expect_words(run: Run, what: str, call: Call, at: Value, fields: dict[str, Value]) -> list[Evidence]:
    """The 8-byte words that a call is handed at ``at`` are the named fields, in order. Raises Differs if not."""
    result = []
    for (name, expected), value in zip(fields.items(), call.words(at, len(fields)), strict=True):
        where = call.at if value.origin is None else value.origin
        if value != expected:
            raise Differs(f"{what}: {name} is {value} at {place(run, where)}; the bridge expects {expected}")
        if value.constant:
            result.append(evidence(run, f"{what}: {name} is {value}", where))
    layout = ", ".join(f"{name} at {8 * i}" for i, name in enumerate(fields))
    return [*result, evidence(run, f"{what}: {layout}", call.at)]


def sent(run: Run, sender: str, what: str, fields: dict[str, Value]) -> list[Evidence]:
    """Every operation handed to ``sender`` begins with the named fields of 8 bytes, in order."""
    return [item for call in calls(run, sender) for item in expect_words(run, what, call, call.arguments[1], fields)]


def compared(run: Run, value: Value) -> list[Found]:
    """The numbers that ``value`` is compared with."""
    facts = [fact for fact in run.facts if isinstance(fact, Compare) and fact.left == value and fact.right.known]
    return [Found(fact.right.constant, _origin(fact, fact.right)) for fact in facts]


def passed(run: Run, target: str, index: int) -> list[Found]:
    """The plain numbers that are passed as argument ``index`` to functions whose name matches ``target``."""
    values = [(call, call.arguments[index]) for call in calls(run, target)]
    return [Found(value.constant, _origin(call, value)) for call, value in values if value.known]


def calls(run: Run, target: str) -> list[Call]:
    """The calls to functions whose name matches ``target`` in full. Raises Differs when there is none."""
    matcher = re.compile(target)
    found = [fact for fact in run.facts if isinstance(fact, Call) and matcher.fullmatch(fact.target or "")]
    if not found:
        raise Differs(f"{readable(run.function.symbol)} does not call {readable(target)}")
    return found


def returned(run: Run, target: str) -> Value:
    """What the first call to ``target`` gives back."""
    call = calls(run, target)[0]
    return unknown(f"{call.target}()@{call.at - run.function.address:x}")


def stores(run: Run, *, address: Value | None = None, value: Value | None = None) -> list[Store]:
    """The stores to ``address``, or of ``value``."""
    facts = [fact for fact in run.facts if isinstance(fact, Store)]
    return [fact for fact in facts if address in (None, fact.address) and value in (None, fact.value)]


def evidence(run: Run, what: str, at: int) -> Evidence:
    """Evidence at an instruction of the function that ``run`` followed."""
    return Evidence(what, readable(run.function.symbol), at - run.function.address, run.text(at), at)


def place(run: Run, at: int) -> str:
    """An instruction's place as text."""
    return f"{readable(run.function.symbol)}+{at - run.function.address:#x} `{run.text(at)}`"


def readable(symbol: str) -> str:
    """A mangled C++ name without its parameters: gloo::transport::uv::Pair::readNextOp. A lambda has its function's."""
    text = symbol[symbol.rfind("ZN4gloo") :] if "ZN4gloo" in symbol else symbol[symbol.rfind("ZNK4gloo") :]
    names, at = [], len("ZNK") if text.startswith("ZNK") else len("ZN")
    while length := re.match(r"\d+", text[at:]):
        start = at + length.end()
        at = start + int(length.group())
        names.append(text[start:at])
        if argument := re.match(r"I[a-z]E", text[at:]):
            at += argument.end()
    if text[at : at + 2] in ("C1", "C2"):
        names.append(names[-1])
    return "::".join(names) or symbol


def _origin(fact: Fact, value: Value) -> int:
    return fact.at if value.origin is None else value.origin


def _count(image: Image, transport: str) -> int:
    namespace = f"4gloo9transport{len(transport)}{transport}"
    return sum(namespace in name for name in image.symbols)
