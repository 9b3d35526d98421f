"""Quantisation while packing against NumPy, bit for bit, on every special value; and the layouts of the output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from epdsl_runtime.rank import Rank
from epdsl_runtime.spawn import spawn

import epdsl.reference as ref
import epdsl.reference_formats as rf
from epdsl.kernels import MXFP4TokenFormat, MXFP8TokenFormat, NVFP4TokenFormat
from epdsl.kernels.expert import SampleExperts
from epdsl.moe import ExpertParallel, MoEConfig

HIDDEN = 512
EXTREMES = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81], np.uint16)


def special_tokens(n: int) -> np.ndarray:
    """Rows that hold every kind of bf16: all bit patterns in turn, groups of one special value, wide ranges, ties of every format."""
    rng = np.random.default_rng(20261130)
    rows = [np.arange(i * HIDDEN, (i + 1) * HIDDEN).astype(np.uint16) for i in range(128)]
    rows += [np.full(HIDDEN, bits, np.uint16) for bits in EXTREMES]
    for bits in EXTREMES:
        row = rng.standard_normal(HIDDEN).astype(ref.BF16).view(np.uint16).copy()
        row[::37] = bits
        rows.append(row)
    for exponent in (-133, -130, -126, -120, -20, -9, -6, 0, 3, 100, 120):
        spread = np.ldexp(rng.uniform(-2, 2, HIDDEN), exponent + rng.integers(-3, 4, HIDDEN))
        rows.append(spread.astype(ref.BF16).view(np.uint16))
    # Multiples of a quarter and an eighth up to the largest e2m1, in groups whose largest is 6: ties.
    ties = (np.arange(HIDDEN) % 97 - 48) / 8
    ties[::16] = 6
    rows.append(ties.astype(ref.BF16).view(np.uint16))
    rows.append((ties * 64).astype(ref.BF16).view(np.uint16))
    return np.stack(rows)[:n].view(ref.BF16)


def quantise_on_device(rank: Rank, name: str, token_format: Any, scale: float, tokens: int) -> list[str]:
    layer = ExpertParallel(
        rank, hidden=HIDDEN, n_experts=1, top_k=1, max_tokens_per_rank=tokens, token_format=token_format or name, n_sms=3, num_threads=128
    )
    x = special_tokens(tokens)
    ids, weights = np.zeros((len(x), 1), np.int32), np.ones((len(x), 1), np.float32)
    options: dict[str, Any] = {"input_scale": scale} if name == "nvfp4" else {}
    handle = layer.dispatch(x, ids, weights, **options)
    y = rank.zeros("bf16", (layer.config.max_recv_tokens, HIDDEN))
    SampleExperts(layer.config.format, 1).scale.launch(rank, grid=2, block=128, args=(y, handle.received, 0))
    rank.synchronize()
    made = layer.config.format
    wanted = rf.quantize(name, x, scale, getattr(made, "scale_rounding", None))
    order = handle.src_info.numpy()[: len(x), 0]
    got = handle.output.numpy()[: len(x)].view(np.uint8)
    problems = mismatches("element", got, wanted.codes[order])
    assert handle.scales is not None and wanted.scales is not None
    counts = handle.expert_counts.numpy()
    scales = rf.gather_scales(name, handle.scales.numpy(), np.array([0, len(x)]), counts, made.scales_in_tiles)[:, : made.n_groups]
    problems += mismatches("scale", np.ascontiguousarray(scales).view(np.uint8), np.ascontiguousarray(wanted.scales[order]).view(np.uint8))
    with np.errstate(all="ignore"):
        back = rf.dequantize(name, wanted, scale)[order].astype(ref.BF16)
    same = (y.numpy()[: len(x)].view(np.uint16) == back.view(np.uint16)) | np.isnan(back.astype(np.float32))
    if not same.all():
        problems.append(f"{int((~same).sum())} values differ when they are expanded again, first at {np.argwhere(~same)[0]}")
    return problems


def mismatches(what: str, got: np.ndarray, wanted: np.ndarray) -> list[str]:
    if got.shape == wanted.shape and np.array_equal(got, wanted):
        return []
    bad = np.argwhere(got != wanted) if got.shape == wanted.shape else [[got.shape, wanted.shape]]
    first = tuple(bad[0])
    return [f"{len(bad)} {what} bytes differ, first at {first}: {got[first]:#x}, expected {wanted[first]:#x}"]


@pytest.mark.parametrize(
    ("name", "token_format", "scale"),
    [
        ("fp8", None, 1.0),
        ("mxfp8", None, 1.0),
        ("mxfp8", MXFP8TokenFormat(HIDDEN, 1, scale_rounding="floor"), 1.0),
        ("mxfp8", MXFP8TokenFormat(HIDDEN, 1, scale_rounding="even", fold_scales=True), 1.0),
        ("mxfp4", None, 1.0),
        ("mxfp4", MXFP4TokenFormat(HIDDEN, 1, scale_rounding="ceil", fold_scales=True), 1.0),
        ("nvfp4", None, 1.0),
        ("nvfp4", NVFP4TokenFormat(HIDDEN, 1, fold_scales=True), 0.37),
    ],
    ids=lambda v: str(v)[:40],
)
def test_quantisation_is_bit_for_bit_that_of_numpy(device_name: str, name: str, token_format: Any, scale: float) -> None:
    tokens = len(special_tokens(10**6))
    assert spawn(quantise_on_device, 1, device=device_name, args=(name, token_format, scale, tokens)) == [[]]


def refused_scales(rank: Rank) -> list[str]:
    texts: list[str] = []
    x, ids, weights = np.ones((1, 32), ref.BF16), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    for token_format, scale in (
        ("mxfp8", 2.0),
        ("nvfp4", 0.0),
        ("nvfp4", float("nan")),
        ("nvfp4", np.ones(1)),
        ("nvfp4", np.ones(2, np.float32)),
        ("nvfp4", "1"),
    ):
        layer = ExpertParallel(
            rank, hidden=32, n_experts=1, top_k=1, max_tokens_per_rank=1, token_format=token_format, n_sms=2, num_threads=64
        )
        with pytest.raises((ValueError, TypeError)) as caught:
            layer.dispatch(x, ids, weights, input_scale=scale)
        texts.append(str(caught.value))
    return texts


def test_a_global_scale_is_a_number_above_0_of_a_format_that_has_one(device_name: str) -> None:
    assert spawn(refused_scales, 1, device=device_name) == [
        [
            "input_scale is for a format with a global scale (nvfp4); this layer's MXFP8TokenFormat has none, leave it out",
            "input_scale is 0.0; it must be a finite number above 0",
            "input_scale is nan; it must be a finite number above 0",
            "input_scale holds f64, expected f32",
            "input_scale has shape (2,), expected (1,)",
            "input_scale has shape (), expected (1,)",
        ]
    ]


def test_options_of_a_format_go_to_the_one_that_is_made() -> None:
    made = NVFP4TokenFormat(32, 1)
    shape: dict[str, Any] = {
        "hidden": 32,
        "n_experts": 1,
        "top_k": 1,
        "max_tokens_per_rank": 1,
        "n_ranks": 1,
        "num_threads": 64,
        "n_sms": 2,
    }
    assert MoEConfig(**shape, token_format="nvfp4", fold_scales=True, tile_claims=1, staged=True).format == NVFP4TokenFormat(
        32, 1, fold_scales=True, staged=True
    )
    with pytest.raises(ValueError, match=r"staged=True beside a token_format that is made already; give it to NVFP4TokenFormat"):
        MoEConfig(**shape, token_format=made, staged=True)
    with pytest.raises(
        ValueError, match="fold_scales=True with token_format='fp8', which has no scales in tiles; use it with mxfp8, mxfp4, nvfp4"
    ):
        MoEConfig(**{**shape, "hidden": 128}, token_format="fp8", fold_scales=True)
