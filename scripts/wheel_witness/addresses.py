"""The checks of the pair address, which both dialects lay out alike but for its sequence number.

Here and in the modules beside it, what a library must hold is taken from the bridge's own modules where they name it.
"""

from __future__ import annotations

from hetdeploy.gloo.address import PAIR_ADDRESS_BYTES, SOCKADDR_BYTES

from .checks import Differs, Evidence, Found, Library, compared, expect, passed, stores
from .trace import Run
from .values import loaded, number, unknown

THIS, FIRST = unknown("arg0"), unknown("arg1")


def record_size(library: Library, namespace: str) -> list[Evidence]:
    """A pair address is 0x88 bytes, both as it is written and as it is accepted."""
    read = _from_bytes(library, namespace)
    write = library.follow(f"_ZNK4gloo9transport{namespace}7Address5bytes(B5cxx11)?Ev")
    size = loaded(8, FIRST.plus(number(8))).plus(loaded(8, FIRST), -1)
    return [
        *expect(read, "the record size that is accepted", compared(read, size), {PAIR_ADDRESS_BYTES}),
        *expect(write, "the record size that is written", passed(write, "_Znwm", 0), {PAIR_ADDRESS_BYTES}),
    ]


def sequence(library: Library, namespace: str, size: int) -> list[Evidence]:
    """The sequence number lies behind the 0x80 bytes of sockaddr_storage and is a signed integer of ``size`` bytes."""
    read = _from_bytes(library, namespace)
    make = library.follow(f"_ZN4gloo9transport{namespace}7AddressC1E16sockaddr_storage[a-z]")
    code = {4: "i", 8: "l"}[size]
    if not make.function.symbol.endswith(code):
        raise Differs(f"the sequence number is of C++ type {make.function.symbol[-1]!r}; the bridge expects {code!r}")
    place, at = _copied(read, SOCKADDR_BYTES)
    offset = Found(place - sockaddr_offset(library, namespace), at)
    made = [store for store in stores(make, address=THIS.plus(number(place))) if not store.value.known]
    return [
        *expect(read, "the sequence number's offset", [offset], {SOCKADDR_BYTES}),
        *expect(make, "the sequence number's size", [Found(store.width, store.at) for store in made], {size}),
    ]


def sockaddr_offset(library: Library, namespace: str) -> int:
    """Where in an Address object the sockaddr lies, that is, where the record's first bytes are copied to."""
    return _copied(_from_bytes(library, namespace), 0)[0]


def _from_bytes(library: Library, namespace: str) -> Run:
    return library.follow(f"_ZN4gloo9transport{namespace}7AddressC2ERKN?St(3__1)?6vectorIc.*")


def _copied(run: Run, offset: int) -> tuple[int, int]:
    """The offset in the object to which the record's word at ``offset`` is copied, and the instruction that does it."""
    word = loaded(8, loaded(8, FIRST).plus(number(offset)))
    for store in stores(run, value=word):
        place = store.address.offset_from(THIS)
        if place is not None:
            return place, store.at
    raise Differs(f"the constructor of a pair address does not copy the 8 bytes at {offset:#x} of the record")
