"""A device that was closed refuses what is asked of it: its memory is somebody else's by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from epdsl_runtime.sim_process import ProcessDevice

import epdsl as ep


@ep.kernel
def one(x: ep.Ptr[ep.f32]) -> None:
    x[ep.thread_idx.x] = 1.0


@pytest.mark.parametrize("opened", [lambda name: ep.open_device(name), lambda name: ProcessDevice("nvidia", 0)], ids=["named", "process"])
def test_a_closed_rank_refuses_at_once(opened: Callable[[str], Any], device_name: str) -> None:
    rank = ep.Rank(0, 1, opened(device_name))
    array = rank.zeros("f32", 128)
    one.launch(rank, grid=1, block=128, args=(array,))
    assert array.numpy().tolist() == [1.0] * 128
    rank.close()
    host = np.zeros(128, np.float32)
    for call in (
        lambda: rank.empty("f32", 4),
        lambda: rank.symmetric("f32", 4),
        lambda: rank.device.upload(array.address, host),
        lambda: rank.device.download(host, array.address),
        lambda: rank.device.memset(array.address, 0, 4),
        rank.synchronize,
        rank.barrier,
        rank.device.synchronize,
        lambda: one.launch(rank, grid=1, block=128, args=(array,)),
    ):
        with pytest.raises(RuntimeError, match=r"was closed; open another"):
            call()
    rank.close()
    rank.device.close()
