"""The checks of the Linux library: gloo's epoll transport, the dialect ``tcp``."""

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
    returned,
    sent,
    stores,
    transport_only,
)
from .trace import Return, Run, Store
from .values import Value, loaded, number, unknown

NAMESPACE = "3tcp"
TCP = "_ZN4gloo9transport3tcp"
SEND_OP = f"{TCP}4Pair13sendAsyncModeERNS1_2OpE"

GREETING_SIZE = SEQUENCE[Dialect.TCP].size
HEADER_SIZE = HEADER_BYTES[Dialect.TCP]
OPCODE_OFFSET = 8
FAMILY_OFFSET, PORT_OFFSET = 0, 2
AF_INET, AF_INET6 = (int.from_bytes(SockAddr(host, 0).encode(Layout.LINUX)[:2], "little") for host in ("0.0.0.0", "::"))
ADDRESSES = {AF_INET: (4, 4), AF_INET6: (8, 16)}  # family: offset and size of the address within the sockaddr
BOUND_BUFFER = 0  # tcp alone has it; no collective of torch uses it
NO_SEQUENCE = -1

THIS, FIRST, SECOND, THIRD, FOURTH = (unknown(f"arg{i}") for i in range(5))


def transport(library: Library) -> list[Evidence]:
    return transport_only(library, "tcp")


def address_record(library: Library) -> list[Evidence]:
    return addresses.record_size(library, NAMESPACE)


def sequence(library: Library) -> list[Evidence]:
    return addresses.sequence(library, NAMESPACE, GREETING_SIZE)


def family(library: Library) -> list[Evidence]:
    run = _is_initiator(library)
    at = number(addresses.sockaddr_offset(library, NAMESPACE) + FAMILY_OFFSET)
    what = "what the 16-bit word at offset 0 of the sockaddr is compared with"
    return expect(run, what, compared(run, loaded(2, FIRST.plus(at))), {AF_INET, AF_INET6})


def who_dials(library: Library) -> list[Evidence]:
    run = _is_initiator(library)
    sockaddr = addresses.sockaddr_offset(library, NAMESPACE)
    result, orders = [], []
    compared_addresses = calls(run, "memcmp")
    for name, (offset, size) in ADDRESSES.items():
        local, remote = (side.plus(number(sockaddr + offset)) for side in (FIRST, SECOND))
        found = [call for call in compared_addresses if call.arguments[:3] == (local, remote, number(size))]
        if not found:
            raise Differs(f"addresses of family {name} are not compared by {size} bytes at {offset} of their sockaddr")
        result.append(evidence(run, f"family {name}: {size} address bytes at {offset} are compared", found[0].at))
        orders.append(f"memcmp()@{found[0].at - run.function.address:x}")
    ports = [loaded(2, side.plus(number(sockaddr + PORT_OFFSET))) for side in (FIRST, SECOND)]
    orders.append(str(ports[0].plus(ports[1], -1)))
    returns = {str(fact.value): fact.value.origin for fact in run.facts if isinstance(fact, Return)}
    for order in orders:
        at = returns.get(f"({order} s> 0x0)")
        if at is None:
            instead = ", ".join(returns)
            raise Differs(f"the local side does not dial if {order} is above 0: isInitiator gives one of {instead}")
        result.append(evidence(run, f"the local side dials if {order} is above 0", at))
    return result


def greeting(library: Library) -> list[Evidence]:
    write = library.follow(f"{TCP}19WriteValueOperationIlE12handleEventsE.*")
    read = library.follow(f"{TCP}18ReadValueOperationIlE12handleEventsE.*")
    return [
        *expect(write, "the greeting written", passed(write, f"{TCP}6Socket5writeEPKvm", 2), {GREETING_SIZE}),
        *expect(read, "the greeting read", passed(read, f"{TCP}6Socket4readEPvm", 2), {GREETING_SIZE}),
    ]


def header_size(library: Library) -> list[Evidence]:
    write, read = library.follow(f"{TCP}4Pair12prepareWriteE.*"), library.follow(f"{TCP}4Pair11prepareReadE.*")
    return [
        *expect(read, "the header's length less what was read", _rest_of_header(read), {HEADER_SIZE}),
        *expect(write, "the header's length less what was written", _rest_of_header(write), {HEADER_SIZE}),
    ]


def header_layout(library: Library) -> list[Evidence]:
    run = library.follow(f"{TCP}4Pair17sendUnboundBufferE.*")
    return sent(run, SEND_OP, "data", _header(FOURTH.plus(number(HEADER_SIZE)), DATA, SECOND, FOURTH))


def opcodes(library: Library) -> list[Evidence]:
    reader, done = library.follow(f"{TCP}4Pair4readEv"), library.follow(f"{TCP}4Pair12readCompleteE.*")
    send_ready, recv_ready = (library.follow(f"{TCP}4Pair19sendNotify{which}ReadyE.*") for which in ("Send", "Recv"))
    buffers = {call.arguments[1] for call in calls(reader, f"{TCP}4Pair11prepareReadE.*")}
    if len(buffers) != 1:
        raise Differs(f"headers are not read into one place but {len(buffers)}")
    opcode = loaded(8, buffers.pop().plus(number(OPCODE_OFFSET)))
    taken = {BOUND_BUFFER, DATA, SEND_READY, RECV_READY}
    return [
        *expect(done, "the op code taken", compared(done, opcode), taken),
        *sent(send_ready, SEND_OP, "send-ready", _notice(SEND_READY)),
        *sent(recv_ready, SEND_OP, "recv-ready", _notice(RECV_READY)),
    ]


def store_record(library: Library) -> list[Evidence]:
    run = library.follow("_ZNK4gloo9transport3tcp4Rank5bytes(B5cxx11)?Ev")
    start = returned(run, "_Znwm")
    copies = calls(run, "memcpy")
    name_length = copies[0].arguments[2]
    behind_name = start.plus(number(8)).plus(name_length)
    at_address = [copy for copy in copies if copy.arguments[0] == behind_name.plus(number(8))]
    if not at_address:
        raise Differs("the address of a rank record does not lie 8 bytes behind its host name")
    address_length = at_address[0].arguments[2]
    behind_address = behind_name.plus(number(8)).plus(address_length)
    result = []
    for what, at in (("host name", start.plus(number(8))), ("sequence numbers", behind_address)):
        found = [copy for copy in copies if copy.arguments[0] == at]
        if not found:
            raise Differs(f"the {what} of a rank record is not where the bridge expects it")
        result.append(evidence(run, f"the {what} at {_less(at, start)}", found[0].at))
    for what, at, length in (("host name", start, name_length), ("address", behind_name, address_length)):
        written = [store for store in stores(run, address=at) if store.value == length and store.width == 8]
        if not written:
            raise Differs(f"a rank record does not give the length of the {what} as 8 bytes before it")
        result.append(evidence(run, f"the {what}'s length, 8 bytes, at {_less(at, start)}", written[0].at))
    connect = library.follow(f"{TCP}7Context24createAndConnectAllPairsE.*")
    own = passed(connect, f"{TCP}7AddressC1E16sockaddr_storagel", 1)
    return [*result, *expect(connect, "the sequence number in the record's own address", own, {NO_SEQUENCE})]


def _is_initiator(library: Library) -> Run:
    return library.follow("_ZNK4gloo9transport3tcp6Device11isInitiatorE.*")


def _rest_of_header(run: Run) -> list[Found]:
    """The numbers from which the count of bytes already done is taken, to get the length of the first part."""
    length = THIRD.plus(number(8))
    found = [fact for fact in run.facts if isinstance(fact, Store) and fact.address == length and fact.value.constant]
    return [Found(fact.value.constant, fact.value.origin or fact.at) for fact in found]


def _header(nbytes: Value, opcode: int, slot: Value, length: Value) -> dict[str, Value]:
    zero = number(0)
    return {"nbytes": nbytes, "opcode": number(opcode), "slot": slot, "offset": zero, "length": length, "roffset": zero}


def _notice(opcode: int) -> dict[str, Value]:
    return _header(number(HEADER_SIZE), opcode, FIRST, SECOND)


def _less(value: Value, base: Value) -> str:
    return str(value.plus(base, -1))


CHECKS = (
    Check("tcp.transport", "the epoll transport is there, and no other", transport),
    Check("tcp.address-record", "a pair address is 0x88 bytes", address_record),
    Check("tcp.sequence", "the sequence number is 8 bytes at 0x80", sequence),
    Check("tcp.family", "the family is the 16-bit word at offset 0: 2 for IPv4, 10 for IPv6", family),
    Check("tcp.who-dials", "the larger address dials, the smaller listens", who_dials),
    Check("tcp.greeting", "the greeting is 8 bytes", greeting),
    Check("tcp.header-size", "a header is 0x30 bytes", header_size),
    Check("tcp.header-layout", "nbytes, opcode, slot, offset, length, roffset; nbytes includes them", header_layout),
    Check("tcp.opcodes", "0 bound buffer, 1 data, 2 send-ready, 3 recv-ready", opcodes),
    Check("tcp.store-record", "lengths of 8 bytes, host name, address, sequence numbers", store_record),
)
