"""Other ways to do the exchange, on PyTorch tensors: what `exchange.py` times beside ours.

Each peer is a generator of phases from the tokens and routing of a `Job`. How many rows go where is computed before the timing starts: the
peers' own exchange of counts is not counted against them, ours is part of our kernels. Combines sum what each rank's experts answer,
weighted by the router, so that all of them are checked by the same bound.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from epdsl.bench_job import Job, Settings, parts

DEEP_EP_SMS = 24


@dataclass(frozen=True)
class Phase:
    """Work of PyTorch's current stream. check raises AssertionError; sent_bytes: to other ranks; sms: None where it is not known."""

    phase: str
    launch: Callable[[], object]
    check: Callable[[], None]
    sent_bytes: int
    sms: int | None = None


def start(rank: Any, port: int) -> tuple[Any, str]:
    """Collective: PyTorch with its process group made, or None and why not."""
    problem, torch = "", None
    try:
        import torch

        torch.cuda.set_device(rank.device.info.index)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problems := [text for text in rank.allgather(problem) if text]:
        return None, problems[0]
    assert torch is not None
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank.index,
        world_size=rank.size,
        timeout=datetime.timedelta(seconds=60),
        device_id=torch.device("cuda", rank.device.info.index),
    )
    return torch, ""


def versions() -> dict[str, str]:
    """PyTorch's version, its CUDA's and NCCL's; nothing without it."""
    try:
        import torch

        return {"torch": torch.__version__, "cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    except Exception:
        return {}


# ---- NumPy and PyTorch


def tensor(torch: Any, array: np.ndarray) -> Any:
    """A copy on the GPU; bf16 stays bf16."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


class Downloaded:
    """A tensor whose slices are NumPy's when asked, as a device array's are."""

    def __init__(self, torch: Any, source: Any) -> None:
        self.torch, self.source = torch, source

    def __getitem__(self, part: slice) -> Downloaded:
        return Downloaded(self.torch, self.source[part])

    def numpy(self) -> np.ndarray:
        return self.source.contiguous().view(self.torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Plan:
    """Where a rank's tokens go, once to each rank.

    order   this rank's tokens in order of (destination, token); to, back: rows to and from each rank
    """

    order: np.ndarray
    to: list[int]
    back: list[int]

    @staticmethod
    def of(job: Job) -> Plan:
        ids, me = job.ids[job.mine], job.rank.index
        there = [np.flatnonzero(((ids >= 0) & (ids // job.local == d)).any(axis=1)) for d in range(job.rank.size)]
        return Plan(np.concatenate(there), [len(rows) for rows in there], job.traffic.rows[:, me].tolist())


def sums_here(job: Job, tokens: np.ndarray) -> np.ndarray:
    """What this rank's experts answer for tokens, weighted and summed, bf16."""
    made = np.empty((len(tokens), job.tokens.shape[1]), ml_dtypes.bfloat16)
    for part in parts(len(tokens)):
        made[part] = job.weighted_sum(tokens[part], job.rank.index)[0].astype(ml_dtypes.bfloat16)
    return made


def remote(job: Job, rows: list[int]) -> int:
    return (sum(rows) - rows[job.rank.index]) * 2 * job.tokens.shape[1]


# ---- the peers


def nccl_rows(torch: Any, job: Job, settings: Settings) -> Iterator[Phase]:
    """all_to_all_single of a row for each destination rank, gathered by index_select; back, and index_add of what returns."""
    del settings
    plan, dist = Plan.of(job), torch.distributed
    x, order = tensor(torch, job.tokens[job.mine]), tensor(torch, plan.order)
    send = torch.empty((len(plan.order), x.shape[1]), dtype=x.dtype, device="cuda")
    recv = torch.empty((sum(plan.back), x.shape[1]), dtype=x.dtype, device="cuda")

    def dispatch() -> None:
        torch.index_select(x, 0, order, out=send)
        dist.all_to_all_single(recv, send, plan.back, plan.to)

    yield Phase(
        "dispatch", dispatch, lambda: job.check_rows("rows", Downloaded(torch, recv), job.tokens, job.once_a_rank), remote(job, plan.to)
    )
    y = tensor(torch, sums_here(job, job.once_a_rank))
    total = torch.empty((job.per_rank, x.shape[1]), dtype=torch.float32, device="cuda")
    out = torch.empty_like(x)

    def combine() -> None:
        dist.all_to_all_single(send, y, plan.to, plan.back)
        out.copy_(total.zero_().index_add_(0, order, send.float()))

    yield Phase("combine", combine, lambda: job.check_sums(Downloaded(torch, out)), remote(job, plan.back))


def nccl_experts(torch: Any, job: Job, settings: Settings) -> Iterator[Phase]:
    """all_to_all_single of a row for each selected expert, with the permutations before and after that make the rows expert-major."""
    dist = torch.distributed
    ids, weights = job.ids[job.mine].ravel(), job.weights[job.mine].ravel()
    pairs = np.argsort(ids, kind="stable")[int((ids < 0).sum()) :]
    source = pairs // settings.top_k
    to = np.bincount(ids[pairs] // job.local, minlength=job.rank.size).tolist()
    token, expert = job.selected
    arrived = np.lexsort((token, expert, token // job.per_rank))
    back = np.bincount(token // job.per_rank, minlength=job.rank.size).tolist()
    # Rows arrive in order of (source, expert, token) and are wanted in order of (expert, source, token).
    forward = np.lexsort((token[arrived], token[arrived] // job.per_rank, expert[arrived]))
    x, index, permute = tensor(torch, job.tokens[job.mine]), tensor(torch, source), tensor(torch, forward)
    inverse = tensor(torch, np.argsort(forward))
    send = torch.empty((len(pairs), x.shape[1]), dtype=x.dtype, device="cuda")
    recv = torch.empty((len(token), x.shape[1]), dtype=x.dtype, device="cuda")
    rows = torch.empty_like(recv)
    wanted, of = job.expert_major(own_first=False)

    def dispatch() -> None:
        torch.index_select(x, 0, index, out=send)
        dist.all_to_all_single(recv, send, back, to)
        torch.index_select(recv, 0, permute, out=rows)

    yield Phase("dispatch", dispatch, lambda: job.check_rows("rows", Downloaded(torch, rows), job.tokens, wanted), remote(job, to))
    y = torch.empty_like(rows)
    for part in parts(len(wanted)):
        y[part].copy_(tensor(torch, job.answer(wanted[part], of[part])))
    factors = tensor(torch, weights[pairs])[:, None]
    total = torch.empty((job.per_rank, x.shape[1]), dtype=torch.float32, device="cuda")
    out = torch.empty_like(x)

    def combine() -> None:
        torch.index_select(y, 0, inverse, out=recv)
        dist.all_to_all_single(send, recv, to, back)
        out.copy_(total.zero_().index_add_(0, index, send.float().mul_(factors)))

    yield Phase("combine", combine, lambda: job.check_sums(Downloaded(torch, out)), remote(job, back))


def gather_scatter(torch: Any, job: Job, settings: Settings) -> Iterator[Phase]:
    """Every token to every rank, and a reduce-scatter of every rank's sums of every token."""
    del settings
    dist, n = torch.distributed, job.rank.size
    x = tensor(torch, job.tokens[job.mine])
    everything = torch.empty((n * job.per_rank, x.shape[1]), dtype=x.dtype, device="cuda")
    tokens = np.arange(n * job.per_rank)
    sent = (n - 1) * x.numel() * 2

    yield Phase(
        "dispatch",
        lambda: dist.all_gather_into_tensor(everything, x),
        lambda: job.check_rows("rows", Downloaded(torch, everything), job.tokens, tokens),
        sent,
    )
    partial, out = tensor(torch, sums_here(job, tokens)), torch.empty_like(x)
    # NCCL adds in bf16: a rounding a rank.
    yield Phase(
        "combine",
        lambda: dist.reduce_scatter_tensor(out, partial),
        lambda: job.check_sums(Downloaded(torch, out), max(1.0, n / 2)),
        sent,
    )


def symmetric_memory(torch: Any, job: Job, settings: Settings) -> Iterator[Phase]:
    """PyTorch's symmetric memory: index_select straight into each peer's buffer, between two barriers on the device; copies back alike."""
    del settings
    import torch.distributed._symmetric_memory as symmetric  # pyright: ignore[reportMissingImports]

    plan, me, n = Plan.of(job), job.rank.index, job.rank.size
    rows, group = job.traffic.rows, torch.distributed.group.WORLD
    x = tensor(torch, job.tokens[job.mine])
    hidden = x.shape[1]
    there = [tensor(torch, part) for part in np.split(plan.order, np.cumsum(plan.to)[:-1])]
    recv = symmetric.empty((int(rows.sum(axis=0).max()), hidden), dtype=x.dtype, device=x.device)
    back = symmetric.empty((int(rows.sum(axis=1).max()), hidden), dtype=x.dtype, device=x.device)
    near, far = symmetric.rendezvous(recv, group), symmetric.rendezvous(back, group)

    def at(handle: Any, peer: int, first: int, count: int) -> Any:
        return handle.get_buffer(peer, (count, hidden), x.dtype, first * hidden)

    targets = [at(near, d, int(rows[:me, d].sum()), plan.to[d]) for d in range(n)]

    def dispatch() -> None:
        near.barrier(channel=0)
        for step in range(n):
            d = (me + step) % n
            if plan.to[d]:
                torch.index_select(x, 0, there[d], out=targets[d])
        near.barrier(channel=1)

    yield Phase(
        "dispatch", dispatch, lambda: job.check_rows("rows", Downloaded(torch, recv), job.tokens, job.once_a_rank), remote(job, plan.to)
    )
    y, order = tensor(torch, sums_here(job, job.once_a_rank)), tensor(torch, plan.order)
    answers = list(torch.split(y, plan.back))
    sources = [at(far, s, int(rows[s, :me].sum()), plan.back[s]) for s in range(n)]
    total = torch.empty((job.per_rank, hidden), dtype=torch.float32, device="cuda")
    out = torch.empty_like(x)

    def combine() -> None:
        far.barrier(channel=0)
        for step in range(n):
            s = (me + step) % n
            if plan.back[s]:
                sources[s].copy_(answers[s])
        far.barrier(channel=1)
        out.copy_(total.zero_().index_add_(0, order, back[: len(plan.order)].float()))

    yield Phase("combine", combine, lambda: job.check_sums(Downloaded(torch, out)), remote(job, plan.back))


def all_to_all_vdev(torch: Any, job: Job, settings: Settings) -> Iterator[Phase]:
    """PyTorch's all_to_all_vdev over NVSHMEM: rows once a rank, gathered by index_select; it has no combine."""
    del settings
    import torch.distributed._symmetric_memory as symmetric  # pyright: ignore[reportMissingImports]

    if not symmetric.is_nvshmem_available():
        raise RuntimeError("this PyTorch has no NVSHMEM")
    symmetric.set_backend("NVSHMEM")
    plan, group, n = Plan.of(job), torch.distributed.group.WORLD, job.rank.size
    x, order = tensor(torch, job.tokens[job.mine]), tensor(torch, plan.order)
    rows = job.traffic.rows
    send = symmetric.empty((int(rows.sum(axis=1).max()), x.shape[1]), dtype=x.dtype, device=x.device)
    recv = symmetric.empty((int(rows.sum(axis=0).max()), x.shape[1]), dtype=x.dtype, device=x.device)
    splits = symmetric.empty(n, dtype=torch.int64, device=x.device)
    places = symmetric.empty((2, n), dtype=torch.int64, device=x.device)
    for made in (send, recv, splits, places):
        symmetric.rendezvous(made, group)
    splits.copy_(torch.tensor(plan.to, dtype=torch.int64))

    def dispatch() -> None:
        torch.index_select(x, 0, order, out=send[: len(plan.order)])
        torch.ops.symm_mem.all_to_all_vdev(send, recv, splits, places, group.group_name)

    yield Phase(
        "dispatch", dispatch, lambda: job.check_rows("rows", Downloaded(torch, recv), job.tokens, job.once_a_rank), remote(job, plan.to)
    )


def deep_ep(torch: Any, job: Job, settings: Settings) -> Iterator[Phase]:
    """DeepEP's normal mode, if it is installed: rows once a rank, its layout computed before."""
    import deep_ep as library  # pyright: ignore[reportMissingImports]

    plan = Plan.of(job)
    library.Buffer.set_num_sms(DEEP_EP_SMS)
    made = library.Buffer(torch.distributed.group.WORLD, num_nvl_bytes=1 << 30, num_rdma_bytes=0)
    x, ids = tensor(torch, job.tokens[job.mine]), tensor(torch, job.ids[job.mine].astype(np.int64))
    weights = tensor(torch, job.weights[job.mine])
    to_ranks, _, to_experts, in_rank, _ = made.get_dispatch_layout(ids, settings.experts)
    layout = {"num_tokens_per_rank": to_ranks, "num_tokens_per_expert": to_experts, "is_token_in_rank": in_rank}
    rows, _, _, _, handle, _ = made.dispatch(x, topk_idx=ids, topk_weights=weights, **layout)
    kept = {"rows": rows}

    def dispatch() -> None:
        # With the handle: its own exchange of counts, which waits for the host, is left out.
        kept["rows"] = made.dispatch(x, handle=handle)[0]

    def check() -> None:
        job.check_rows("rows", Downloaded(torch, kept["rows"]), job.tokens, job.once_a_rank)

    yield Phase("dispatch", dispatch, check, remote(job, plan.to), DEEP_EP_SMS)
    y = tensor(torch, sums_here(job, job.once_a_rank))

    def combine() -> None:
        kept["out"] = made.combine(y, handle)[0]

    yield Phase("combine", combine, lambda: job.check_sums(Downloaded(torch, kept["out"])), remote(job, plan.back), DEEP_EP_SMS)


PEERS: dict[str, Callable[[Any, Job, Settings], Iterator[Phase]]] = {
    "NCCL all-to-all once a rank": nccl_rows,
    "NCCL all-to-all per expert": nccl_experts,
    "NCCL all-gather and reduce-scatter": gather_scatter,
    "PyTorch symmetric memory": symmetric_memory,
    "DeepEP": deep_ep,
    "PyTorch all_to_all_vdev": all_to_all_vdev,
}
# Needs another backend of PyTorch's symmetric memory, which a process chooses once.
APART = ("PyTorch all_to_all_vdev",)
