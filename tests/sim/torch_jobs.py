"""The PyTorch exchange against the same layer in NumPy, forward and backward, compiled and in CUDA graphs; DLPack both ways."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import epdsl as ep

SEED = 20261130


def sizes(sim: bool) -> tuple[int, int, int, int]:
    """hidden, experts, top-k, tokens of a rank."""
    return (128, 4, 2, 8) if sim else (1024, 16, 4, 128)


def made(n_ranks: int, sim: bool) -> tuple[np.ndarray, ...]:
    """Every rank's tokens, routing and weights, and the experts' scales: each rank can compute the whole layer by itself."""
    hidden, experts, top_k, tokens = sizes(sim)
    rng = np.random.default_rng(SEED)
    shape = (n_ranks, tokens)
    x = rng.integers(-4, 5, (*shape, hidden)).astype(np.float32) / 4
    ids = np.argsort(rng.random((*shape, experts)), axis=2)[:, :, :top_k].astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    weights = rng.choice(np.array([0.25, 0.5, 1.0], np.float32), (*shape, top_k))
    scales = rng.choice(np.array([0.5, 1.0, 2.0], np.float32), experts)
    grads = rng.integers(-2, 3, (*shape, hidden)).astype(np.float32)
    return x, ids, weights, scales, grads


def expected(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, scales: np.ndarray, grads: np.ndarray) -> tuple[np.ndarray, ...]:
    """out = sum over k of weight * scale(expert) * x: in f64, with the gradients of x, of the weights and of every expert's scale."""
    present = ids >= 0
    factor = np.where(present, weights * scales[ids], 0).astype(np.float64)
    dot = (x.astype(np.float64) * grads).sum(axis=-1)
    of_scales = np.zeros(len(scales))
    np.add.at(of_scales, ids[present], (weights * dot[..., None])[present])
    return x * factor.sum(-1)[..., None], grads * factor.sum(-1)[..., None], np.where(present, scales[ids] * dot[..., None], 0), of_scales


def scaled(received: Any, scales: Any) -> Any:
    """The rows times the sum of weight * scale over this rank's selections, in plain PyTorch."""
    import torch

    chosen = scales[received.topk_idx.clamp(min=0).long()]
    factor = torch.where(received.topk_idx >= 0, received.weights * chosen, 0).sum(1)
    return (received.rows.float() * factor[:, None]).to(torch.bfloat16)


def second_derivatives(out: Any, t: Any, w: Any) -> tuple[Any, ...]:
    """The gradients of the squares of the gradients of the squares of `out`."""
    import torch

    first = torch.autograd.grad((out.double() ** 2).sum(), (t, w), create_graph=True)
    return torch.autograd.grad(sum((one.double() ** 2).sum() for one in first), (t, w))


def job(rank: ep.Rank, backends: Sequence[str]) -> list[str]:
    """Compares everything; returns what to print."""
    import torch

    from epdsl.torch_exchange import TorchExchange

    sim = rank.device.info.kind == "sim"
    hidden, experts, top_k, tokens = sizes(sim)
    place = "cpu" if sim else f"cuda:{rank.device.info.index}"
    if not sim:
        torch.cuda.set_device(rank.device.info.index)
    lines = [f"torch {torch.__version__}"]
    blocks = {"n_blocks": 2, "num_threads": 256} if sim else {"n_blocks": 16}
    exchange = TorchExchange(rank, hidden=hidden, n_experts=experts, top_k=top_k, max_tokens_per_rank=tokens, **blocks)
    x, ids, weights, scales, grads = made(rank.size, sim)
    me, local = rank.index, experts // rank.size
    wanted = expected(x, ids, weights, scales, grads)

    def given(r, g=True):
        t = torch.tensor(x[r], dtype=torch.bfloat16, device=place, requires_grad=g)
        w = torch.tensor(weights[r], device=place, requires_grad=g)
        s = torch.tensor(scales[me * local : (me + 1) * local], device=place, requires_grad=g)
        return t, torch.tensor(ids[r], device=place), w, s

    def layer(t, i, w, s):
        received = exchange.dispatch(t, i, w)
        return exchange.combine(scaled(received, s), received)

    def compare(name, out, t, w, s):
        """Relative to the largest entry; a sum of bf16 rows rounds each to 2**-9."""
        bad = []
        pairs = [("out", out, wanted[0][me])]
        if t.grad is not None:
            pairs += [("grad x", t.grad, wanted[1][me]), ("grad weights", w.grad, wanted[2][me])]
            pairs += [("grad scales", s.grad, wanted[3][me * local : (me + 1) * local])]
        for what, got, want in pairs:
            error = np.abs(got.detach().float().cpu().numpy() - want).max() / np.abs(want).max()
            bad += [f"{what} {error:.1e}"]
            assert error < 2**-7, (name, what, error)
        lines.append(f"{name}: largest errors {', '.join(bad)}")

    for name in ("eager", *backends):
        function = layer if name == "eager" else torch.compile(layer, fullgraph=True, backend=name)
        start = time.perf_counter()
        t, i, w, s = given(me)
        out = function(t, i, w, s)
        out.backward(torch.tensor(grads[me], dtype=torch.bfloat16, device=place))
        compare(name, out, t, w, s)
        rank.barrier()
        lines[-1] += f" ({time.perf_counter() - start:.1f} s)"
    # Every weight arrives once, at the rank of its expert, and so does its gradient.
    t, i, w, s = given(me)
    received = exchange.dispatch(t, i, w)
    received.weights.sum().backward()
    assert (w.grad == (i >= 0)).all() and (received.weights[received.topk_idx < 0] == 0).all() and not t.grad.any()
    rank.barrier()
    # The same formula without an exchange, in f64.
    t, i, w, s = given(me)
    exact = [one.detach().double().requires_grad_(True) for one in (t, w)]
    factor = torch.where(i >= 0, exact[1] * torch.tensor(scales, device=place)[i.clamp(min=0).long()], 0).sum(1)
    wants = second_derivatives(exact[0] * factor[:, None], *exact)
    gots = second_derivatives(layer(t, i, w, s), t, w)
    errors = [float((got.double() - want).abs().max() / want.abs().max()) for got, want in zip(gots, wants, strict=True)]
    lines.append(f"second derivatives: largest errors x {errors[0]:.1e}, weights {errors[1]:.1e}")
    assert max(errors) < 2**-5, errors
    rank.barrier()
    if backends:
        # Simulated ranks are threads, and have one cache of what was compiled.
        if rank.index == 0 or not sim:
            torch._dynamo.reset()
        rank.barrier()
        function = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for n in (tokens, tokens - 3, 0):
            t, i, w, s = given(me, False)
            assert torch.equal(function(t[:n], i[:n], w[:n], s), layer(t[:n], i[:n], w[:n], s)), n
        lines.append("aot_eager, other numbers of tokens: equal")
        rank.barrier()
    if not sim:
        with torch.no_grad():
            t, i, w, s = given(me, False)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    layer(t, i, w, s)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            rank.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer(t, i, w, s)
            wrong = 0
            for number in range(200):
                # Other tokens every time: those of this rank, rotated.
                t.copy_(torch.tensor(np.roll(x[me], number, 0), dtype=torch.bfloat16))
                i.copy_(torch.tensor(np.roll(ids[me], number, 0)))
                w.copy_(torch.tensor(np.roll(weights[me], number, 0)))
                graph.replay()
                torch.cuda.synchronize()
                want = np.roll(wanted[0][me], number, 0)
                wrong += int(np.abs(out.float().cpu().numpy() - want).max() > 2**-7 * np.abs(want).max())
            lines.append(f"torch.cuda.graph: 200 replays with other routing, {wrong} wrong")
            rank.barrier()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                got = layer(*given(me, False))
            stream.synchronize()
            compare("another stream", got, *(given(me, False)[n] for n in (0, 2, 3)))
    # DLPack, both ways, without copies.
    ours = rank.array(np.arange(24, dtype=np.float32).reshape(4, 6))
    theirs = torch.from_dlpack(ours)
    assert theirs.data_ptr() == ours.address and theirs.device.type == place.split(":")[0] and theirs[3, 5] == 23
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.uint8, torch.float16):
        from epdsl_runtime.array import borrowed

        tensor = torch.zeros(8, device=place).to(dtype)
        back = borrowed(rank.device, tensor)
        assert back.address == tensor.data_ptr() and back.size == 8
        try:
            again = torch.from_dlpack(back)
            assert again.dtype == dtype and again.data_ptr() == tensor.data_ptr()
            lines.append(f"{dtype}: {back.dtype_name} and back")
        except (BufferError, RuntimeError, ValueError) as error:
            lines.append(f"{dtype}: {back.dtype_name}; not back: {str(error).splitlines()[0][:100]}")
    if not sim:
        viewed = torch.as_tensor(ours, device=place)
        assert viewed.data_ptr() == ours.address
        lines.append("__cuda_array_interface__: the same memory")
    rank.barrier()
    exchange.close()
    return lines
