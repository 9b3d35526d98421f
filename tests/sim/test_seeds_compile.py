"""Every part of the family compiles for the GPUs it is for, and the vendor's own instructions are in it."""

from __future__ import annotations

from typing import Any

import pytest

from epdsl.codegen import CodegenError, find_tool
from epdsl.kernels import FORMATS, BF16TokenFormat, EPCombineKernel, EPDispatchKernel, NullTrace, RingTrace
from epdsl.kernels.fused_example import EPDispatchConsume
from epdsl.kernels.multi_gpu import MultiGpuAllReduce

DISPATCH: dict[str, Any] = {
    "num_threads": 384,
    "n_sms": 16,
    "n_experts": 16,
    "n_ranks": 2,
    "max_tokens_per_rank": 16,
    "p2p_world_size": 2,
}
EVERYTHING: dict[str, Any] = {
    "fused_shared_expert": True,
    "ep_final_layout": True,
    "ep_prod_reserve": True,
    "ep_copy_role_split": True,
    "ep_send_join_named": True,
}
COMBINE: dict[str, Any] = {**DISPATCH, "top_k": 4, "msg_bytes": 1024}
TARGETS = ["sm_90", "gfx942", "gfx950"]


def needs_linker(target: str) -> None:
    if target.startswith("gfx"):
        try:
            find_tool("ld.lld", "ld.lld")
        except CodegenError as error:
            pytest.skip(f"no linker for AMD here: {error}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_dispatch_with_every_flag(target: str, name: str) -> None:
    needs_linker(target)
    made = EPDispatchKernel(**DISPATCH, **EVERYTHING, token_fmt_type=FORMATS[name](512, 4)).dispatch.compile(target)
    text = made.text("ptx" if target == "sm_90" else "gcn")
    if target == "sm_90":
        assert any(
            line.split()[0].startswith(("barrier", "bar.")) and line.split(None, 1)[1:] == ["3, 384;"]
            for line in text.splitlines()
            if line.split()
        )
        assert ("cvt.rn.satfinite.e4m3x2.f32" in text) == (name in ("fp8", "mxfp8"))
    else:
        assert "s_barrier" in text


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "options",
    [{"fused_shared_expert": True, "schedule": "balanced"}, {"skip_a2a": True, "unreduced": True, "trace": RingTrace()}],
    ids=["shared", "local, unreduced, traced"],
)
def test_combines(target: str, options: dict[str, Any]) -> None:
    needs_linker(target)
    EPCombineKernel(**COMBINE, **options).combine.compile(target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_joined_kernel_and_the_multi_gpu_barrier(target: str) -> None:
    needs_linker(target)
    dispatch = EPDispatchKernel(**DISPATCH, token_fmt_type=BF16TokenFormat(512, 4), trace=NullTrace())
    EPDispatchConsume(dispatch, n_compute_threads=128, token_block=64).dispatch_and_consume.compile(target)
    MultiGpuAllReduce(2, named_barrier=4).all_reduce.compile(target)
