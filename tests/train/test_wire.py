import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetdeploy.train.errors import MisuseError
from hetdeploy.train.summing import algorithm_for
from hetdeploy.train.wire import BLOCK, wire_format

FORMATS = ["fp32", "bf16", "int8"]


def values_of(numel, seed, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** (spread * torch.randn(numel, generator=generator))


def through(wire, values):
    payload = torch.empty(wire.payload_bytes(values.numel()), dtype=torch.uint8)
    wire.encode(values, payload)
    decoded = torch.empty_like(values)
    wire.decode(payload, decoded)
    return decoded


def largest_in_block(values):
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % BLOCK))
    return padded.view(-1, BLOCK).max(dim=1).values.repeat_interleave(BLOCK)[: values.numel()]


def stated_error(name, values):
    """What wire.py's table allows, with the roundings of fp32 itself on top."""
    if name == "fp32":
        return torch.zeros_like(values)
    if name == "bf16":
        return values.abs() * 2**-8
    return largest_in_block(values) / 254 * (1 + 1e-5)


@given(name=st.sampled_from(FORMATS), numel=st.integers(0, 1500), seed=st.integers(0, 999))
def test_each_format_keeps_its_stated_error(name, numel, seed):
    values = values_of(numel, seed)
    error = (through(wire_format(name), values) - values).abs()
    assert bool((error <= stated_error(name, values)).all())


@given(name=st.sampled_from(FORMATS), numel=st.integers(1, 600), seed=st.integers(0, 99))
def test_accumulating_is_decoding_and_adding_in_fp32(name, numel, seed):
    wire, values, sum_ = wire_format(name), values_of(numel, seed), values_of(numel, seed + 1)
    payload = torch.empty(wire.payload_bytes(numel), dtype=torch.uint8)
    wire.encode(values, payload)
    expected = sum_ + through(wire, values)
    wire.accumulate(payload, sum_)
    assert torch.equal(sum_, expected)


def test_a_sum_of_bf16_payloads_keeps_the_bits_that_a_bf16_sum_loses():
    wire, total = wire_format("bf16"), torch.tensor([256.0])
    payload = torch.empty(2, dtype=torch.uint8)
    wire.encode(torch.tensor([1.0]), payload)
    wire.accumulate(payload, total)
    assert total.item() == 257.0


def test_sizes_are_what_is_stated():
    million = 256 * 4096
    assert [wire_format(name).payload_bytes(million) / million for name in FORMATS] == [4, 2, 1 + 4 / 256]


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e30, 3e38])
def test_int8_survives_the_ends_of_fp32(scale):
    values = torch.linspace(-1, 1, 300) * scale
    decoded = through(wire_format("int8"), values)
    assert bool(decoded.isfinite().all())
    # Below the smallest normal fp32 the step itself is rounded, to a multiple of 1.4e-45.
    assert bool(((decoded - values).abs() <= stated_error("int8", values) + 128 * 1.5e-45).all())


@given(seed=st.integers(0, 99), sends=st.integers(1, 30))
def test_error_feedback_makes_the_sum_of_what_was_sent_right(seed, sends):
    wire = wire_format("int8")
    residual = torch.zeros(300)
    sent, decoded, fp32_rounding = (torch.zeros(300, dtype=torch.float64) for _ in range(3))
    for i in range(sends):
        values = values_of(300, seed * 100 + i, spread=0.5)
        sent += values
        corrected = values + residual
        arrived = through(wire, corrected)
        residual = corrected - arrived
        decoded += arrived
        fp32_rounding += 2 * 2**-24 * corrected.abs()
    # However many sends: off by the last rounding alone, not by the sum of all of them.
    assert bool(((decoded - sent).abs() <= stated_error("int8", corrected) + fp32_rounding).all())


def test_without_feedback_a_small_value_beside_a_large_one_would_never_arrive():
    wire = wire_format("int8")
    values = torch.tensor([1.0, 0.001])
    residual, arrived, plain = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    for _ in range(1000):
        plain += through(wire, values)
        corrected = values + residual
        decoded = through(wire, corrected)
        residual = corrected - decoded
        arrived += decoded
    assert plain[1].item() == 0.0
    assert arrived[1].item() == pytest.approx(1.0, abs=1 / 127)


def test_an_unknown_format_is_refused():
    with pytest.raises(MisuseError, match="use fp32, bf16 or int8"):
        wire_format("fp8")


def test_two_ranks_always_gather_and_more_weigh_bytes_against_a_round():
    assert algorithm_for(2, 1 << 30) == "gather"
    assert algorithm_for(3, 1 << 10) == "gather"
    assert algorithm_for(3, 1 << 20) == "two-phase"
    assert algorithm_for(8, 1 << 20) == "two-phase"
