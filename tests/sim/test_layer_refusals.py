"""What a layer refuses, one rank of two alone: nothing was launched or changed by it, and the exchanges that follow are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_graphs import HIDDEN, TOKENS, Step, layer_of

import epdsl as ep

SEED = 23


def refused(rank: ep.Rank, mode: str) -> None:
    layer = layer_of(rank, mode)
    step = Step(rank, layer, mode, TOKENS)
    expected, handle = step.fill(SEED, 0), step()
    rank.barrier()
    step.check(expected, f"{mode} seed {SEED}: before")
    if rank.index == 0:
        apart = rank.zeros("bf16", TOKENS * HIDDEN + 8)[1 : TOKENS * HIDDEN + 1].reshape(TOKENS, HIDDEN)
        outs: dict[str, Any] = {
            rf"out has shape \({TOKENS - 1}, {HIDDEN}\), expected \({TOKENS}, {HIDDEN}\)": rank.zeros("bf16", (TOKENS - 1, HIDDEN)),
            rf"out has shape \({TOKENS}, {HIDDEN // 2}\), expected \({TOKENS}, {HIDDEN}\)": rank.zeros("bf16", (TOKENS, HIDDEN // 2)),
            "out holds f32, expected bf16": rank.zeros("f32", (TOKENS, HIDDEN)),
            "out is a .*give a device array": np.zeros((TOKENS, HIDDEN), step.out.dtype),
        }
        for _ in range(3):
            with pytest.raises(ValueError, match=r"must be aligned to \d+ bytes; address 0x[0-9a-f]+ is 2 bytes past"):
                layer.dispatch(apart, step.ids, step.weights)
            with pytest.raises(TypeError, match="topk_idx holds i64, expected i32"):
                layer.dispatch(step.x, np.zeros((TOKENS, 2), np.int64), step.weights)
        for text, out in outs.items():
            with pytest.raises((TypeError, ValueError), match=text):
                layer.combine(step.y, handle, out=out)
    for number in range(1, 4):
        expected = step.fill(SEED, number)
        step()
        rank.barrier()
        step.check(expected, f"{mode} seed {SEED} step {number}, rank {rank.index}")
    layer.close()


@pytest.mark.parametrize("mode", ["latency", "stamps", "throughput", "base"])
def test_what_one_rank_is_refused_changes_nothing(device_name: str, mode: str) -> None:
    ep.spawn(refused, ranks=2, device=device_name, args=(mode,))


def kept(rank: ep.Rank) -> None:
    """A handle of the latency mode is valid until the second dispatch after it; a dispatch that was refused is none."""
    layer = layer_of(rank, "latency")
    step = Step(rank, layer, "latency", TOKENS)
    step.fill(SEED, 0)
    first = layer.dispatch(step.x, step.ids, step.weights)
    rank.barrier()
    before = first.row_of.numpy().tobytes(), first.expert_counts.numpy().tolist()
    with pytest.raises(ValueError, match="must be aligned"):
        layer.dispatch(rank.zeros("bf16", TOKENS * HIDDEN + 8)[1 : TOKENS * HIDDEN + 1].reshape(TOKENS, HIDDEN), step.ids, step.weights)
    step.fill(SEED, 1)
    second = layer.dispatch(step.x, step.ids, step.weights)
    rank.barrier()
    assert second.row_of.address != first.row_of.address
    assert (first.row_of.numpy().tobytes(), first.expert_counts.numpy().tolist()) == before
    layer.close()


def test_a_refused_dispatch_does_not_age_a_handle(device_name: str) -> None:
    ep.spawn(kept, ranks=2, device=device_name)


class Theirs:
    """An array of another library, in host memory, that NumPy cannot read."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("not on the host")

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


def validated(rank: ep.Rank) -> None:
    layer = layer_of(rank, "base")
    step = Step(rank, layer, "base", TOKENS)
    step.fill(SEED, 0)
    ids = step.ids.numpy()
    layer.dispatch(step.x, Theirs(ids), step.weights, validate=True)
    rank.barrier()
    ids[1] = 3
    with pytest.raises(ValueError, match=rf"rank {rank.index}: topk_idx\[1, 1\] repeats an expert"):
        layer.dispatch(step.x, Theirs(ids), step.weights, validate=True)
    layer.close()


def test_another_librarys_ids_are_validated() -> None:
    ep.spawn(validated, ranks=2, device="sim")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("torch.float8_e4m3fn", "f8e4m3"), ("torch.float8_e5m2", "f8e5m2"), ("torch.bfloat16", "bf16"), ("torch.complex64", "complex64")],
)
def test_element_types_of_other_libraries(dtype: str, name: str) -> None:
    from epdsl.moe_arrays import dtype_of

    class Tensor:
        pass

    tensor: Any = Tensor()
    tensor.dtype = dtype
    assert dtype_of(tensor) == name
