"""The PyTorch exchange on the simulator, where PyTorch is installed."""

from __future__ import annotations

import pytest

import epdsl as ep

pytest.importorskip("torch")


def test_the_exchange_and_its_gradients(device_name: str) -> None:
    import torch_jobs

    for lines in ep.spawn(torch_jobs.job, 2, device=device_name, args=(["aot_eager"],), timeout=120):
        assert [line for line in lines if line.startswith(("eager: ", "aot_eager: "))] and "torch.bfloat16: bf16 and back" in lines
