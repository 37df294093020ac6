"""The checks of the macOS library: gloo's libuv transport, the dialect ``uv``."""

from __future__ import annotations

from hetdeploy.gloo.address import SEQUENCE, SockAddr
from hetdeploy.gloo.dialect import Dialect, Layout
from hetdeploy.gloo.wire import DATA, HEADER_BYTES, RECV_READY, SEND_READY

from . import addresses
from .checks import (
    Check,
    Differs,
    Evidence,
    Found,
    Library,
    calls,
    compared,
    evidence,
    expect,
    passed,
    place,
    returned,
    sent,
    stores,
    transport_only,
)
from .trace import Run
from .values import Value, loaded, number, unknown

NAMESPACE = "2uv"
UV = "_ZN4gloo9transport2uv"
READ = f"{UV}5libuv3TCP4readEPcm"
WRITE = f"{UV}5libuv3TCP5writeEPcm"
WRITE_OP = f"{UV}4Pair7writeOpENS1_2OpE"
WRITE_LATER = r"_ZNSt3__110__function6__funcIZN4gloo9transport2uv4Pair7writeOpENS4_2OpEE.*clEv"
INITIATE, LISTEN = f"{UV}6Device18connectAsInitiatorE.*", f"{UV}6Device17connectAsListenerE.*"

GREETING_SIZE = SEQUENCE[Dialect.UV].size
HEADER_SIZE = HEADER_BYTES[Dialect.UV]
OPCODE_OFFSET = 8
FAMILY_OFFSET, PORT_OFFSET = 1, 2
AF_INET, AF_INET6 = (SockAddr(host, 0).encode(Layout.DARWIN)[FAMILY_OFFSET] for host in ("0.0.0.0", "::"))
ADDRESSES = {AF_INET: (4, 4), AF_INET6: (8, 16)}  # family: offset and size of the address within the sockaddr
RANK_KEY = "rank_"
ORDERED = (" s< 0x0", " s>= 0x0")

THIS, FIRST, SECOND, FOURTH = (unknown(f"arg{i}") for i in (0, 1, 2, 4))


def transport(library: Library) -> list[Evidence]:
    return transport_only(library, "uv")


def address_record(library: Library) -> list[Evidence]:
    return addresses.record_size(library, NAMESPACE)


def sequence(library: Library) -> list[Evidence]:
    return addresses.sequence(library, NAMESPACE, GREETING_SIZE)


def family(library: Library) -> list[Evidence]:
    at = number(addresses.sockaddr_offset(library, NAMESPACE) + FAMILY_OFFSET)
    printed, connected = library.follow("_ZNK4gloo9transport2uv7Address3strEv"), _connector(library)
    what = "what the byte at offset 1 of the sockaddr is compared with"
    families = {AF_INET, AF_INET6}
    return [
        *expect(printed, what, compared(printed, loaded(1, THIS.plus(at))), families),
        *expect(connected, what, compared(connected, loaded(1, FIRST.plus(at))), families),
    ]


def who_dials(library: Library) -> list[Evidence]:
    run = _connector(library)
    sockaddr = addresses.sockaddr_offset(library, NAMESPACE)
    family_byte = loaded(1, FIRST.plus(number(sockaddr + FAMILY_OFFSET)))
    result = []
    for name, (offset, size) in ADDRESSES.items():
        local, remote = (side.plus(number(sockaddr + offset)) for side in (FIRST, SECOND))
        is_family = f"{family_byte} == {number(name)}"
        found = [call for call in calls(run, "memcmp") if is_family in [text for text, _ in call.conditions]]
        if not found or any(call.arguments[:3] != (local, remote, number(size)) for call in found):
            raise Differs(f"addresses of family {name} are not compared by {size} bytes at {offset} of their sockaddr")
        result.append(evidence(run, f"family {name}: {size} address bytes at {offset} are compared", found[0].at))
    ports = [loaded(2, side.plus(number(sockaddr + PORT_OFFSET))) for side in (FIRST, SECOND)]
    ports_differ = str(ports[0].plus(ports[1], -1))
    for target, sign, role in ((LISTEN, "s<", "smaller listens"), (INITIATE, "s>=", "larger dials")):
        for call in calls(run, target):
            order = [met for met in call.conditions if "memcmp()" in met.text and met.text.endswith(ORDERED)]
            if len(order) != 1 or f" {sign} " not in order[0].text or ports_differ not in order[0].text:
                reason = "; ".join(met.text for met in order or call.conditions)
                raise Differs(f"it is not so that the {role}: {place(run, call.at)} is reached if {reason}")
            result.append(evidence(run, "the sign of local minus remote address, then raw port, decides", order[0].at))
            result.append(evidence(run, f"the {role}", call.at))
    return list(dict.fromkeys(result))


def greeting(library: Library) -> list[Evidence]:
    write = library.follow(f"{UV}5libuv3TCP5writeIiEEvT_")
    accept = library.follow(f"{UV}6Device25connectAsListenerCallbackE.*")
    buffer = returned(write, "_Znam")
    written = [Found(store.width, store.at) for store in stores(write, address=buffer, value=FIRST)]
    return [
        *expect(write, "the greeting's buffer", passed(write, "_Znam", 0), {GREETING_SIZE}),
        *expect(write, "the greeting's number", written, {GREETING_SIZE}),
        *expect(accept, "the greeting awaited", compared(accept, _event_length(SECOND)), {GREETING_SIZE}),
    ]


def header_size(library: Library) -> list[Evidence]:
    first, following, write = library.follow(f"{UV}4Pair10readNextOpEv"), _reader(library), library.follow(WRITE_LATER)
    return [
        *expect(first, "the header read first", passed(first, READ, 2), {HEADER_SIZE}),
        *expect(following, "the header read next", passed(following, READ, 2), {HEADER_SIZE}),
        *expect(following, "the header's length as read", compared(following, _event_length(FIRST)), {HEADER_SIZE}),
        *expect(write, "the header written", passed(write, WRITE, 2), {HEADER_SIZE}),
    ]


def header_layout(library: Library) -> list[Evidence]:
    run = library.follow(f"{UV}4Pair17sendUnboundBufferE.*")
    return sent(run, WRITE_OP, "data", _header(FOURTH.plus(number(HEADER_SIZE)), DATA, FIRST, FOURTH))


def opcodes(library: Library) -> list[Evidence]:
    reader = _reader(library)
    send_ready, recv_ready = (library.follow(f"{UV}4Pair19sendNotify{which}ReadyE.*") for which in ("Send", "Recv"))
    buffers = {call.arguments[1] for call in calls(reader, READ) if call.arguments[2] == number(HEADER_SIZE)}
    if len(buffers) != 1:
        raise Differs(f"headers are not read into one place but {len(buffers)}")
    opcode = loaded(4, buffers.pop().plus(number(OPCODE_OFFSET)))
    return [
        *expect(reader, "the op code taken", compared(reader, opcode), {DATA, SEND_READY, RECV_READY}),
        *sent(send_ready, WRITE_OP, "send-ready", _notice(SEND_READY)),
        *sent(recv_ready, WRITE_OP, "recv-ready", _notice(RECV_READY)),
    ]


def store_record(library: Library) -> list[Evidence]:
    if library.symbol(f"{UV}7Context24createAndConnectAllPairsE.*"):
        raise Differs("gloo::transport::uv::Context has a createAndConnectAllPairs of its own, with records of its own")
    run = library.follow("_ZN4gloo9transport7Context24createAndConnectAllPairsE.*")
    found = []
    for call in calls(run, ".*basic_string.*insert.*"):
        _, at, prefix, *_ = call.arguments
        text = library.image.string(prefix.constant) if prefix.known else None
        if at != number(0) or text != RANK_KEY:
            raise Differs(f"a host name's key is the rank after {text!r}, not {RANK_KEY!r}: {place(run, call.at)}")
        found.append(evidence(run, f"a host name's key is the rank after {RANK_KEY!r}", prefix.origin or call.at))
    return list(dict.fromkeys(found))


def _connector(library: Library) -> Run:
    return library.follow(f"{UV}6Device7connectER.*")


def _reader(library: Library) -> Run:
    return library.follow(f"{UV}4Pair6onReadER.*ReadEvent.*TCPE")


def _event_length(event: Value) -> Value:
    """The length in a libuv read event."""
    return loaded(8, event.plus(number(0x10)))


def _header(nbytes: Value, opcode: int, tag: Value, length: Value) -> dict[str, Value]:
    return {"nbytes": nbytes, "opcode": number(opcode), "tag": tag, "length": length}


def _notice(opcode: int) -> dict[str, Value]:
    return _header(number(HEADER_SIZE), opcode, FIRST, SECOND)


CHECKS = (
    Check("uv.transport", "the libuv transport is there, and no other", transport),
    Check("uv.address-record", "a pair address is 0x88 bytes", address_record),
    Check("uv.sequence", "the sequence number is 4 bytes at 0x80", sequence),
    Check("uv.family", "the family is the byte at offset 1: 2 for IPv4, 0x1e for IPv6", family),
    Check("uv.who-dials", "the larger address dials, the smaller listens", who_dials),
    Check("uv.greeting", "the greeting is 4 bytes", greeting),
    Check("uv.header-size", "a header is 0x20 bytes", header_size),
    Check("uv.header-layout", "nbytes, opcode, tag, length; nbytes includes them", header_layout),
    Check("uv.opcodes", "1 data, 2 send-ready, 3 recv-ready", opcodes),
    Check("uv.store-record", "host names are stored under 'rank_' and the rank", store_record),
)
