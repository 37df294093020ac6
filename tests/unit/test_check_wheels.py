"""The wheel check against made-up machine code: what it accepts, and that it accepts nothing else.

The two listings at the end are the shortest functions that do what gloo's do as far as the protocol goes: the bytes,
then what they mean. Every check passes on them, and must refuse them when one instruction it relies on is off by a bit.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import check_wheels
import pytest
from wheel_witness import tcp, uv
from wheel_witness.arm64 import Arm64
from wheel_witness.checks import Check, Differs, Evidence, Library, evidence, examine, readable
from wheel_witness.images import Function, Image, Machine
from wheel_witness.prove import prove
from wheel_witness.trace import Dialect
from wheel_witness.values import number, unknown
from wheel_witness.x86_64 import X86

START, STRIDE = 0x10000, 0x100
IMPORTS = {
    0x800: "memcmp",
    0x810: "_Znwm",
    0x820: "_Znam",
    0x830: "_ZNSt3__112basic_stringIcE6insertEmPKc",
    0x840: "memcpy",
}
CONSTANTS = {
    0x900: (0x20).to_bytes(8, "little") + (2).to_bytes(8, "little"),
    0x910: b"rank_" + bytes(11),
    0x920: (0x30).to_bytes(8, "little") + (3).to_bytes(8, "little"),
}


class Listing(Image):
    """An image made of a listing: one function after the other, ``STRIDE`` bytes apart."""

    def __init__(self, machine: Machine, text: str) -> None:
        self.machine = machine
        self.functions: dict[str, bytes] = {}
        self.meant: dict[str, list[str]] = {}
        for line in text.split("\n"):
            if line.startswith("_Z"):
                symbol = line
                self.functions[symbol], self.meant[symbol] = b"", []
            elif line:
                code, _, meaning = line.strip().partition(" ")
                self.functions[symbol] += bytes.fromhex(code)
                self.meant[symbol].append(meaning.strip())
        self.symbols = {symbol: START + STRIDE * i for i, symbol in enumerate(self.functions)}

    def patch(self, symbol: str, old: str, new: str) -> None:
        """Replaces the one place where ``symbol`` has the bytes ``old`` (hexadecimal)."""
        code = self.functions[symbol]
        assert code.count(bytes.fromhex(old)) == 1
        self.functions[symbol] = code.replace(bytes.fromhex(old), bytes.fromhex(new))

    def function(self, symbol: str) -> Function:
        return Function(symbol, self.symbols[symbol], self.functions[symbol])

    def constant(self, address: int, size: int) -> bytes | None:
        data = b"".join(CONSTANTS[at] for at in sorted(CONSTANTS))
        at = address - min(CONSTANTS)
        return data[at : at + size] if 0 <= at <= len(data) - size else None

    def name(self, address: int) -> str | None:
        here = (symbol for symbol, start in self.symbols.items() if start == address)
        return IMPORTS.get(address) or next(here, None)


def macos() -> Listing:
    return Listing("arm64", MACOS)


def linux() -> Listing:
    return Listing("x86-64", LINUX)


EVERY_CHECK = [
    pytest.param(listing, check, id=check.name)
    for listing, checks in ((macos, uv.CHECKS), (linux, tcp.CHECKS))
    for check in checks
]


@pytest.mark.parametrize(("listing", "dialect"), [(macos, Arm64()), (linux, X86())], ids=["macos", "linux"])
def test_the_listings_mean_what_they_say(listing, dialect: Dialect):
    image = listing()
    for symbol in image.symbols:
        function = image.function(symbol)
        decoded = dialect.decode(function.code, function.address)
        assert [f"{item.mnemonic} {item.op_str}".strip() for item in decoded] == image.meant[symbol]


@pytest.mark.parametrize(("listing", "check"), EVERY_CHECK)
def test_check_passes_and_says_where(listing, check: Check):
    found = check.verify(Library(listing()))
    assert found
    assert all(item.instruction for item in found) or check.name.endswith(".transport")


@pytest.mark.parametrize(("listing", "check"), EVERY_CHECK)
def test_check_fails_when_any_instruction_that_it_relies_on_changes(listing, check: Check):
    proofs = prove(listing(), check)
    assert proofs or check.name.endswith(".transport")
    assert [proof.evidence for proof in proofs if proof.verdict is None] == []


@pytest.mark.parametrize(("listing", "check"), [param for param in EVERY_CHECK if not param.id.endswith(".transport")])
def test_check_fails_when_a_function_is_gone(listing, check: Check):
    image = listing()
    library = Library(image)
    check.verify(library)
    for symbol in {run.function.symbol for run in library.runs.values()}:
        shortened = listing()
        del shortened.symbols[symbol]
        with pytest.raises(Differs, match=readable(symbol)):
            check.verify(Library(shortened))


def test_check_that_looks_without_comparing_is_found_out():
    def look(library: Library) -> list[Evidence]:
        run = library.follow("_ZNK4gloo9transport2uv7Address5bytesEv")
        return [evidence(run, "the record size", run.function.address)]

    (proof,) = prove(macos(), Check("sloppy", "whatever", look))
    assert proof.verdict is None


@pytest.mark.parametrize("symbol", ["_ZN4gloo9transport3tcp4PairC1Ev", "_ZN4gloo9transport7ibverbs4PairC1Ev"])
def test_second_transport_on_macos(symbol: str):
    image = macos()
    image.symbols[symbol] = 0
    with pytest.raises(Differs, match="the bridge expects uv alone"):
        uv.transport(Library(image))


def test_other_transport_on_linux():
    image = linux()
    image.symbols = {symbol.replace("3tcp", "2uv"): address for symbol, address in image.symbols.items()}
    with pytest.raises(Differs, match="0 symbols of gloo::transport::tcp"):
        tcp.transport(Library(image))


def test_difference_names_the_constant_and_the_place():
    image = macos()
    image.patch("_ZN4gloo9transport2uv4Pair10readNextOpEv", "02048052", "02068052")
    (result,) = [result for result in examine(Library(image), uv.CHECKS) if result.problem]
    assert result.check.name == "uv.header-size"
    assert result.problem == (
        "the header read first is 0x30 at gloo::transport::uv::Pair::readNextOp+0x4 `mov w2, #0x30`; "
        "the bridge expects 0x20"
    )


def test_family_byte_at_the_offset_of_linux():
    image = macos()
    image.patch("_ZNK4gloo9transport2uv7Address3strEv", "08244039", "08204039")
    with pytest.raises(Differs, match=r"the byte at offset 1 of the sockaddr .* is not to be found in .*Address::str"):
        uv.family(Library(image))


def test_ports_compared_the_other_way_round():
    image = macos()
    connect = next(symbol for symbol in image.symbols if "7connectE" in symbol)
    image.patch(connect, "0801094b", "2801084b")
    with pytest.raises(Differs, match="it is not so that the smaller listens"):
        uv.who_dials(Library(image))


def test_smaller_dials_on_linux():
    image = linux()
    image.patch("_ZNK4gloo9transport3tcp6Device11isInitiatorE", "0f9fc0", "0f9cc0")
    with pytest.raises(Differs, match="the local side does not dial if memcmp"):
        tcp.who_dials(Library(image))


def test_header_fields_exchanged():
    image = linux()
    image.patch("_ZN4gloo9transport3tcp4Pair17sendUnboundBufferE", "4889542410", "4889542418")
    with pytest.raises(Differs, match=r"data: slot is u64\[sp-0x20\] at .*; the bridge expects arg2"):
        tcp.header_layout(Library(image))


def test_host_names_under_another_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CONSTANTS, 0x910, b"host_" + bytes(11))
    with pytest.raises(Differs, match="a host name's key is the rank after 'host_', not 'rank_'"):
        uv.store_record(Library(macos()))


def test_sums_of_unknowns():
    size = unknown("end").plus(unknown("start"), -1).plus(number(8))
    assert str(size) == "end-start+0x8"
    assert size.offset_from(unknown("end").plus(unknown("start"), -1)) == 8
    assert size.offset_from(unknown("end")) is None
    assert number((1 << 64) - 1) == number(-1)


def test_version_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert check_wheels.main(["--cache", str(tmp_path), "latest"]) == 2
    assert capsys.readouterr().err == "check_wheels: 'latest' is not a torch version: name one like 2.13.0\n"


def test_wheel_without_a_library(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    wheel = cached(tmp_path, {})
    assert check_wheels.main(["--cache", str(tmp_path), "0.0.1"]) == 1
    assert f"{wheel} has no torch/lib/libtorch_cpu.dylib" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [wheel.parent]


def test_library_of_another_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    cached(tmp_path, {"torch/lib/libtorch_cpu.dylib": b"\xcf\xfa\xed\xfe\x07\0\0\1" + bytes(24)})
    assert check_wheels.main(["--cache", str(tmp_path), "0.0.1"]) == 1
    assert "is neither an x86-64 ELF nor an arm64 Mach-O library" in capsys.readouterr().err


def cached(cache: Path, files: dict[str, bytes]) -> Path:
    """A macOS wheel of torch 0.0.1 in the cache, where the check finds it without asking pip."""
    wheel = cache / "torch-0.0.1-macosx_14_0_arm64" / "torch-0.0.1-cp311-cp311-macosx_14_0_arm64.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


MACOS = """
_ZN4gloo9transport2uv7AddressC2ERKNSt3__16vectorIcNS3_9allocatorIcEEEE
    282440a9            ldp x8, x9, [x1]
    290108cb            sub x9, x9, x8
    3f2102f1            cmp x9, #0x88
    c1000054            b.ne #0x10024
    0001c03d            ldr q0, [x8]
    0080803c            stur q0, [x0, #8]
    084140f9            ldr x8, [x8, #0x80]
    084400f9            str x8, [x0, #0x88]
    c0035fd6            ret
    200020d4            brk #1
_ZNK4gloo9transport2uv7Address5bytesEv
    00118052            mov w0, #0x88
    c3c1ff17            b #0x810
_ZN4gloo9transport2uv7AddressC1E16sockaddr_storagei
    028800b9            str w2, [x0, #0x88]
    c0035fd6            ret
_ZNK4gloo9transport2uv7Address3strEv
    08244039            ldrb w8, [x0, #9]
    1f090071            cmp w8, #2
    40000054            b.eq #0x10310
    1f790071            cmp w8, #0x1e
    c0035fd6            ret
_ZN4gloo9transport2uv6Device18connectAsInitiatorE
    c0035fd6            ret
_ZN4gloo9transport2uv6Device17connectAsListenerE
    c0035fd6            ret
_ZN4gloo9transport2uv6Device7connectERKNS1_7AddressES5_
    f40301aa            mov x20, x1
    f50302aa            mov x21, x2
    88264039            ldrb w8, [x20, #9]
    1f090071            cmp w8, #2
    c0000054            b.eq #0x10628
    1f790071            cmp w8, #0x1e
    21020054            b.ne #0x1065c
    08028052            mov w8, #0x10
    02028052            mov w2, #0x10
    03000014            b #0x10630
    88018052            mov w8, #0xc
    82008052            mov w2, #4
    8002088b            add x0, x20, x8
    a102088b            add x1, x21, x8
    72c0ff97            bl #0x800
    88164079            ldrh w8, [x20, #0xa]
    a9164079            ldrh w9, [x21, #0xa]
    0801094b            sub w8, w8, w9
    1f000071            cmp w0, #0
    0801801a            csel w8, w8, w0, eq
    4800f837            tbnz w8, #0x1f, #0x10658
    6bffff17            b #0x10400
    aaffff17            b #0x10500
    200020d4            brk #1
_ZN4gloo9transport2uv5libuv3TCP5writeIiEEvT_
    f403012a            mov w20, w1
    80008052            mov w0, #4
    46c0ff97            bl #0x820
    140000b9            str w20, [x0]
    c0035fd6            ret
_ZN4gloo9transport2uv6Device25connectAsListenerCallbackE
    480840f9            ldr x8, [x2, #0x10]
    1f1100f1            cmp x8, #4
    c0035fd6            ret
_ZN4gloo9transport2uv5libuv3TCP4readEPcm
    c0035fd6            ret
_ZN4gloo9transport2uv5libuv3TCP5writeEPcm
    c0035fd6            ret
_ZN4gloo9transport2uv4Pair7writeOpENS1_2OpE
    c0035fd6            ret
_ZN4gloo9transport2uv4Pair10readNextOpEv
    01000191            add x1, x0, #0x40
    02048052            mov w2, #0x20
    3effff17            b #0x10900
_ZN4gloo9transport2uv4Pair6onReadERKNS1_5libuv9ReadEventERKNS3_3TCPE
    280840f9            ldr x8, [x1, #0x10]
    1f8100f1            cmp x8, #0x20
    094840b9            ldr w9, [x0, #0x48]
    3f050071            cmp w9, #1
    80000054            b.eq #0x10d20
    3f090071            cmp w9, #2
    40000054            b.eq #0x10d20
    3f0d0071            cmp w9, #3
    01000191            add x1, x0, #0x40
    02048052            mov w2, #0x20
    f6feff17            b #0x10900
_ZNSt3__110__function6__funcIZN4gloo9transport2uv4Pair7writeOpENS4_2OpEE3_0FvvEEclEv
    02048052            mov w2, #0x20
    fffeff17            b #0x10a00
_ZN4gloo9transport2uv4Pair17sendUnboundBufferE
    ff8300d1            sub sp, sp, #0x20
    88800091            add x8, x4, #0x20
    29008052            mov w9, #1
    e82700a9            stp x8, x9, [sp]
    e11301a9            stp x1, x4, [sp, #0x10]
    e1030091            mov x1, sp
    fafeff17            b #0x10b00
_ZN4gloo9transport2uv4Pair19sendNotifySendReadyE
    ff8300d1            sub sp, sp, #0x20
    e8c7f710            adr x8, #0x900
    0001c03d            ldr q0, [x8]
    e003803d            str q0, [sp]
    e10b01a9            stp x1, x2, [sp, #0x10]
    e1030091            mov x1, sp
    bafeff17            b #0x10b00
_ZN4gloo9transport2uv4Pair19sendNotifyRecvReadyE
    ff8300d1            sub sp, sp, #0x20
    08048052            mov w8, #0x20
    69008052            mov w9, #3
    e82700a9            stp x8, x9, [sp]
    e10b01a9            stp x1, x2, [sp, #0x10]
    e1030091            mov x1, sp
    7afeff17            b #0x10b00
_ZN4gloo9transport7Context24createAndConnectAllPairsE
    010080d2            mov x1, #0
    a2b7f710            adr x2, #0x8f8
    42600091            add x2, x2, #0x18
    89bdff17            b #0x830
"""

LINUX = """
_ZN4gloo9transport3tcp7AddressC2ERKSt6vectorIcSaIcEE
    488b06              mov rax, qword ptr [rsi]
    488b4e08            mov rcx, qword ptr [rsi + 8]
    4829c1              sub rcx, rax
    4881f988000000      cmp rcx, 0x88
    7516                jne 0x10029
    f30f6f00            movdqu xmm0, xmmword ptr [rax]
    0f114708            movups xmmword ptr [rdi + 8], xmm0
    488b8080000000      mov rax, qword ptr [rax + 0x80]
    48898788000000      mov qword ptr [rdi + 0x88], rax
    c3                  ret
_ZNK4gloo9transport3tcp7Address5bytesEv
    bf88000000          mov edi, 0x88
    e90607ffff          jmp 0x810
_ZN4gloo9transport3tcp7AddressC1E16sockaddr_storagel
    4889b788000000      mov qword ptr [rdi + 0x88], rsi
    c3                  ret
_ZNK4gloo9transport3tcp6Device11isInitiatorE
    4889f5              mov rbp, rsi
    4889d3              mov rbx, rdx
    0fb74508            movzx eax, word ptr [rbp + 8]
    83f802              cmp eax, 2
    7419                je 0x10328
    83f80a              cmp eax, 0xa
    753a                jne 0x1034e
    ba10000000          mov edx, 0x10
    488d7310            lea rsi, [rbx + 0x10]
    488d7d10            lea rdi, [rbp + 0x10]
    e8da04ffff          call 0x800
    eb12                jmp 0x1033a
    ba04000000          mov edx, 4
    488d730c            lea rsi, [rbx + 0xc]
    488d7d0c            lea rdi, [rbp + 0xc]
    e8c604ffff          call 0x800
    85c0                test eax, eax
    750a                jne 0x10348
    0fb7450a            movzx eax, word ptr [rbp + 0xa]
    0fb7530a            movzx edx, word ptr [rbx + 0xa]
    29d0                sub eax, edx
    85c0                test eax, eax
    0f9fc0              setg al
    c3                  ret
    0f0b                ud2
_ZN4gloo9transport3tcp6Socket5writeEPKvm
    c3                  ret
_ZN4gloo9transport3tcp6Socket4readEPvm
    c3                  ret
_ZN4gloo9transport3tcp19WriteValueOperationIlE12handleEventsE
    ba08000000          mov edx, 8
    e9f6fdffff          jmp 0x10400
_ZN4gloo9transport3tcp18ReadValueOperationIlE12handleEventsE
    ba08000000          mov edx, 8
    e9f6fdffff          jmp 0x10500
_ZN4gloo9transport3tcp4Pair13sendAsyncModeERNS1_2OpE
    c3                  ret
_ZN4gloo9transport3tcp4Pair12prepareWriteE
    b830000000          mov eax, 0x30
    482b4650            sub rax, qword ptr [rsi + 0x50]
    48894108            mov qword ptr [rcx + 8], rax
    c3                  ret
_ZN4gloo9transport3tcp4Pair11prepareReadE
    b830000000          mov eax, 0x30
    482b4648            sub rax, qword ptr [rsi + 0x48]
    48894108            mov qword ptr [rcx + 8], rax
    c3                  ret
_ZN4gloo9transport3tcp4Pair4readEv
    488d7740            lea rsi, [rdi + 0x40]
    e9f7feffff          jmp 0x10a00
_ZN4gloo9transport3tcp4Pair12readCompleteE
    488b4748            mov rax, qword ptr [rdi + 0x48]
    85c0                test eax, eax
    740d                je 0x10c15
    83f801              cmp eax, 1
    7408                je 0x10c15
    83f802              cmp eax, 2
    7403                je 0x10c15
    83f803              cmp eax, 3
    c3                  ret
_ZN4gloo9transport3tcp4Pair17sendUnboundBufferE
    4883ec30            sub rsp, 0x30
    498d4030            lea rax, [r8 + 0x30]
    48890424            mov qword ptr [rsp], rax
    48c744240801000000  mov qword ptr [rsp + 8], 1
    4889542410          mov qword ptr [rsp + 0x10], rdx
    48c744241800000000  mov qword ptr [rsp + 0x18], 0
    4c89442420          mov qword ptr [rsp + 0x20], r8
    48c744242800000000  mov qword ptr [rsp + 0x28], 0
    4889e6              mov rsi, rsp
    e9c7faffff          jmp 0x10800
_ZN4gloo9transport3tcp4Pair19sendNotifySendReadyE
    4883ec30            sub rsp, 0x30
    660fefc0            pxor xmm0, xmm0
    0f11442418          movups xmmword ptr [rsp + 0x18], xmm0
    0f11442420          movups xmmword ptr [rsp + 0x20], xmm0
    48c7042430000000    mov qword ptr [rsp], 0x30
    48c744240802000000  mov qword ptr [rsp + 8], 2
    4889742410          mov qword ptr [rsp + 0x10], rsi
    4889542420          mov qword ptr [rsp + 0x20], rdx
    4889e6              mov rsi, rsp
    e9cbf9ffff          jmp 0x10800
_ZN4gloo9transport3tcp4Pair19sendNotifyRecvReadyE
    4883ec30            sub rsp, 0x30
    660fefc0            pxor xmm0, xmm0
    0f11442418          movups xmmword ptr [rsp + 0x18], xmm0
    0f11442420          movups xmmword ptr [rsp + 0x20], xmm0
    660f6f0506fafeff    movdqa xmm0, xmmword ptr [rip - 0x105fa]
    0f290424            movaps xmmword ptr [rsp], xmm0
    4889742410          mov qword ptr [rsp + 0x10], rsi
    4889542420          mov qword ptr [rsp + 0x20], rdx
    4889e6              mov rsi, rsp
    e9d0f8ffff          jmp 0x10800
_ZNK4gloo9transport3tcp4Rank5bytesEv
    4889f3              mov rbx, rsi
    4c8b6308            mov r12, qword ptr [rbx + 8]
    48c7c700080000      mov rdi, 0x800
    e8fdf7feff          call 0x810
    4889c5              mov rbp, rax
    4c896500            mov qword ptr [rbp], r12
    488d7d08            lea rdi, [rbp + 8]
    488b33              mov rsi, qword ptr [rbx]
    4c89e2              mov rdx, r12
    e817f8feff          call 0x840
    4c01e5              add rbp, r12
    4c8b6b28            mov r13, qword ptr [rbx + 0x28]
    4c896d08            mov qword ptr [rbp + 8], r13
    488d7d10            lea rdi, [rbp + 0x10]
    4c89ea              mov rdx, r13
    e800f8feff          call 0x840
    4a8d3c28            lea rdi, [rax + r13]
    e9f7f7feff          jmp 0x840
_ZN4gloo9transport3tcp7Context24createAndConnectAllPairsE
    48c7c6ffffffff      mov rsi, 0xffffffffffffffff
    e9f4f0ffff          jmp 0x10200
"""
