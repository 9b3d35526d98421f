"""The PyTorch exchange on the simulator, where PyTorch is installed."""

from __future__ import annotations

import pytest

import epdsl as ep

pytest.importorskip("torch")


def test_the_exchange_and_its_gradients(device_name: str) -> None:
    import torch_jobs

    for lines in ep.spawn(torch_jobs.job, 2, device=device_name, args=(["aot_eager"],), timeout=120):
        assert [line.partition(":")[0] for line in lines][1:4] == ["eager", "aot_eager", "second derivatives"]
        assert "aot_eager, other numbers of tokens: equal" in lines and "torch.bfloat16: bf16 and back" in lines


def refused(rank: ep.Rank) -> None:
    """What other libraries' tests of an operation ask for, and what ours says to tensors that it cannot use."""
    import torch

    from epdsl.torch_exchange import TorchExchange

    exchange = TorchExchange(rank, hidden=128, n_experts=4, top_k=2, max_tokens_per_rank=8, n_blocks=2, num_threads=256)
    x, w = torch.ones((8, 128), dtype=torch.bfloat16), torch.ones((8, 2))
    ids = torch.tensor([[0, 3]] * 8, dtype=torch.int32)
    for given, text in (
        ((x.float(), ids, w), "x holds f32, expected bf16"),
        ((x, ids.long(), w), "topk_idx holds i64, expected i32"),
        ((x.t().contiguous().t(), ids, w), r"'x' got a torch tensor of shape \(8, 128\) with strides \(1, 8\)"),
        ((x, ids, torch.ones((2, 8)).t()), "'topk_weights' got a torch tensor"),
        ((torch.ones(8 * 128 + 1, dtype=torch.bfloat16)[1:].view(8, 128), ids, w), "'x' must be aligned to 16 bytes"),
        ((x.to("meta"), ids, w), "the tensors lie on cpu and meta; all of them must be on this rank's device"),
        ((torch.cat([x, x]), torch.cat([ids, ids]), torch.cat([w, w])), "16 tokens, the layer was made for max_tokens_per_rank=8"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            exchange.dispatch(*given)
    received = exchange.dispatch(x, ids, w)
    with pytest.raises(ValueError, match=r"y is of shape \(3, 128\), expected \(8, 128\)"):
        exchange.combine(x[:3], received)
    assert torch.equal(exchange.combine(received.rows, received), x)
    places = (ids, received.rank_rows, *received.places, exchange.number)
    checked = (
        torch.library.opcheck(torch.ops.epdsl.dispatch, (x.clone().requires_grad_(), ids, w.clone().requires_grad_(), exchange.number)),
        torch.library.opcheck(torch.ops.epdsl.combine, (received.rows.clone().requires_grad_(), *places)),
        torch.library.opcheck(torch.ops.epdsl.numbers_back, (received.weights.clone().requires_grad_(), received.topk_idx, *places)),
    )
    assert all(set(found.values()) == {"SUCCESS"} for found in checked)
    exchange.close()
    with pytest.raises(RuntimeError, match="is closed or belongs to another process"):
        exchange.dispatch(x, ids, w)


def test_what_the_exchange_refuses_and_what_pytorch_checks() -> None:
    ep.spawn(refused, 1, device="sim", timeout=120)
