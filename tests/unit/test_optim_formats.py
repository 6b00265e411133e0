"""The split master loses nothing; compact moments round without bias and keep their promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.optim import Field, compact
from overspill.optim.compact import SIGNED, UNSIGNED, Noise, from_int8, to_bf16, to_int8
from overspill.optim.formats import (
    join_master,
    master_fields,
    moment_fields,
    round_to_upper,
    split_master,
)


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int64).to(torch.int32).view(torch.float32)


UPPER_HALVES = [
    0x0000,
    0x0001,
    0x007F,
    0x0080,
    0x3F7F,
    0x3F80,
    0x7F7E,
    0x7F7F,
    0x8000,
    0xBF80,
    0xFF7F,
]


@pytest.mark.parametrize("upper", UPPER_HALVES, ids=hex)
def test_split_is_lossless_over_all_lower_halves(upper: int) -> None:
    value = floats((upper << 16) | torch.arange(2**16))
    high, low = split_master(value)
    assert high.dtype is torch.bfloat16
    assert low.dtype is torch.int16
    assert torch.equal(join_master(high, low).view(torch.int32), value.view(torch.int32))
    # To nearest, ties away from zero.
    stays = torch.arange(2**16) < 0x8000
    expected = torch.where(stays, upper, upper + 1).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(high.view(torch.int16), expected.view(torch.int16))


def test_split_of_infinity_and_nan() -> None:
    infinite = torch.tensor([math.inf, -math.inf])
    high, low = split_master(infinite)
    assert high.isinf().all()
    assert torch.equal(join_master(high, low), infinite)
    payloads = torch.tensor(
        [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF80FFFF, 0xFFFFFFFF, 0xFFC08000]
    )
    high, low = split_master(floats(payloads))
    assert high.isnan().all()
    assert ((high.view(torch.int16) & 0x40) != 0).all(), "a NaN's upper half must be quiet"
    assert join_master(high, low).isnan().all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_split_of_anything(words: list[int]) -> None:
    value = floats(torch.tensor(words))
    back = join_master(*split_master(value))
    assert torch.equal(back.isnan(), value.isnan())
    kept = ~value.isnan()
    assert torch.equal(back.view(torch.int32)[kept], value.view(torch.int32)[kept])


def test_rounding_matches_torch_but_for_ties() -> None:
    value = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    tie = (value.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(round_to_upper(value)[~tie], value.bfloat16()[~tie])


def test_fields() -> None:
    assert master_fields(torch.bfloat16, "split") == (Field("master_lo", torch.int16),)
    assert master_fields(torch.float16, "fp32") == (Field("master", torch.float32),)
    assert master_fields(torch.float32, None) == ()
    code, scale = moment_fields("exp_avg", "int8")
    assert (code.elements(257), scale.elements(257)) == (257, 2)
    assert (code.elements(0), scale.elements(0)) == (0, 0)
    for dtype, master in (
        (torch.float32, "split"),
        (torch.float32, "fp32"),
        (torch.float16, "split"),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            master_fields(dtype, master)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float64"):
        master_fields(torch.float64, None)
    with pytest.raises(ValueError, match="unknown"):
        moment_fields("exp_avg", "fp8")  # type: ignore[arg-type]


def test_noise_is_uniform_and_differs_by_step_and_moment() -> None:
    numel = 2**16
    noise = Noise(0, 0, 12345).bits(numel, 16, torch.device("cpu"))
    assert abs(float(noise.double().mean()) / 2**16 - 0.5) < 0.002
    counts = torch.bincount(noise >> 8, minlength=256)
    assert counts.min() > 200
    assert counts.max() < 320
    for other in (Noise(0, 1, 12345), Noise(0, 0, 54321), Noise(256, 0, 12345)):
        bits = other.bits(numel, 16, torch.device("cpu"))
        both = torch.stack([noise, bits]).double()
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.1
    shifted = Noise(1000, 0, 12345).bits(100, 16, torch.device("cpu"))
    assert torch.equal(shifted, noise[1000:1100])


def _mean_after_rounding(value: torch.Tensor, kind: str) -> torch.Tensor:
    total = torch.zeros_like(value, dtype=torch.float64)
    rounds = 400
    for step in range(rounds):
        noise = Noise(0, 0, (step * 2654435761) % 2**32)
        if kind == "bf16":
            total += to_bf16(value, noise).double()
        else:
            codes = UNSIGNED if kind == "unsigned" else SIGNED
            total += from_int8(*to_int8(value, noise, codes), codes).double()
    return total / rounds


@pytest.mark.parametrize("kind", ["bf16", "signed", "unsigned"])
def test_rounding_has_no_bias(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(512, generator=generator) * 10 ** torch.empty(512).uniform_(
        -3, 0, generator=generator
    )
    value = value.abs() if kind == "unsigned" else value
    off = (_mean_after_rounding(value, kind) - value) / value.abs()
    # A single rounding is off by up to 1/8 (int8) or 2^-7 (bf16); its mean over 400 by far less.
    largest = 2**-7 if kind == "bf16" else 1 / 8
    assert float(off.abs().max()) < largest / 5
    assert abs(float(off.mean())) < largest / 100


def test_int8_error_is_bounded() -> None:
    value = torch.cat([torch.logspace(-30, 3, 256), -torch.logspace(-4, 0, 256)])
    back = from_int8(*to_int8(value, Noise(0, 0, 7), SIGNED), SIGNED)
    block_most = value.view(-1, 256).abs().amax(1).repeat_interleave(256)
    # Half an octave's eighth, and below the map's smallest value its spacing.
    bound = torch.maximum(value.abs() / 8, block_most * 2.0**-18)
    assert ((back - value).abs() <= bound).all()
    assert (back * value >= 0).all(), "signs stay"


def test_squares_are_never_rounded_to_zero() -> None:
    value = torch.logspace(-44, 4, 512)
    for key in range(20):
        back = from_int8(*to_int8(value, Noise(0, 0, key), UNSIGNED), UNSIGNED)
        assert ((back > 0) == (value > 0)).all()
    mixed = torch.zeros(512)
    mixed[3] = 1e-20
    back = from_int8(*to_int8(mixed, Noise(0, 0, 1), UNSIGNED), UNSIGNED)
    assert float(back[:256].min()) > 0 and float(back[4]) < 1e-9 * 1e-20
    assert not back[256:].any(), "a block of zeroes stays one"
    nothing = torch.zeros(300)
    codes, scale = to_int8(nothing, Noise(0, 0, 1), UNSIGNED)
    assert not codes.any()
    assert torch.isfinite(scale).all()
    assert not from_int8(codes, scale, UNSIGNED).any()


def test_largest_of_a_block_survives() -> None:
    """The largest value never wraps around to a small code, whatever the noise."""
    for key in range(50):
        value = torch.rand(2560, generator=torch.Generator().manual_seed(key)) + 0.5
        value *= 10.0 ** (key - 25)
        for kind in (SIGNED, UNSIGNED):
            back = from_int8(*to_int8(value, Noise(0, 0, key), kind), kind)
            assert ((back / value - 1).abs() < 1 / 7).all()


def test_what_is_not_finite_poisons_its_block() -> None:
    for bad in (math.inf, math.nan):
        value = torch.ones(512)
        value[300] = bad
        back = from_int8(*to_int8(value, Noise(0, 0, 1), UNSIGNED), UNSIGNED)
        assert torch.isfinite(back[:256]).all()
        assert not torch.isfinite(back[256:]).any()


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (compact.SIGNED, 1.0), (compact.UNSIGNED, 1e-31),
        pytest.param(compact.SIGNED, 1e-31, marks=pytest.mark.soak),
        pytest.param(compact.UNSIGNED, 1.0, marks=pytest.mark.soak),
    ],
    ids=["signed", "unsigned small", "signed small", "unsigned"],
)  # fmt: skip
def test_int8_moments_are_known_again(kind: compact.CodeMap, size: float) -> None:
    """All blocks: those whose largest element has the code below the largest, one in 4,096, and
    those of the smallest scale, too."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    value = torch.randn(256 * 20_000, generator=draw, device="cpu") * size
    value = value if kind.signed else value.square()
    noise = compact.Noise(0, 0, compact.noise_key(1))
    codes, scale = compact.to_int8(value, noise, kind)
    stored = compact.from_int8(codes, scale, kind)
    found, again, scales = compact.as_it_was(stored, kind)
    assert bool((found | (stored.view(-1, 256) == 0).all(1)).all())
    here = found.repeat_interleave(256)
    assert torch.equal(compact.from_int8(again, scales, kind)[here], stored[here])
