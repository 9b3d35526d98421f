"""Other ways to do the exchange, on PyTorch tensors: what `exchange.py` times beside ours.

Each peer is a generator of phases from the tokens and routing of a `Job`; a phase is checked and timed before the next is asked for, and
the generator is closed at the end. How many rows go where is computed before the timing starts: the peers' own exchange of counts is not
counted against them, ours is part of our kernels. Combines sum what each rank's experts answer, weighted by the router, so that all are
checked by the same bound.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from epdsl.bench_job import Job, Settings, parts


@dataclass(frozen=True)
class Work:
    """What a peer is asked for. sweep: multiprocessors to time its phases with beside its own number, where it can be given one."""

    settings: Settings
    sweep: tuple[int, ...] = ()


@dataclass(frozen=True)
class Phase:
    """Work of PyTorch's current stream, to be launched once before it is checked.

    check       raises AssertionError
    sent_bytes  to other ranks
    sms         None where it is not known
    format      of the rows on the link: "bf16", or "fp8" with a f32 scale per 128 elements
    own_bytes   what the peer's own benchmark divides by its time; 0 where it has none
    """

    phase: str
    launch: Callable[[], object]
    check: Callable[[], None]
    sent_bytes: int
    sms: int | None = None
    format: str = "bf16"
    own_bytes: int = 0


Phases = Generator[Phase, None, None]
Peer = Callable[[Any, Job, Work], Phases]


def row_bytes(form: str, hidden: int) -> int:
    """Of a row of so many elements in a format of `Phase`."""
    return {"bf16": 2 * hidden, "fp8": hidden + hidden // 128 * 4}[form]


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


# How types that NumPy lacks travel: NumPy's type of the same size, and PyTorch's names of both.
CARRIED: dict[np.dtype, tuple[type, str, str]] = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, "int16", "bfloat16"),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, "uint8", "float8_e4m3fn"),
}


def tensor(torch: Any, array: np.ndarray) -> Any:
    """A copy on the GPU; bf16 and e4m3 stay what they are."""
    array = np.ascontiguousarray(array)
    if array.dtype in CARRIED:
        plain, _, name = CARRIED[array.dtype]
        return torch.from_numpy(array.view(plain)).cuda().view(getattr(torch, name))
    return torch.from_numpy(array).cuda()


class Downloaded:
    """A tensor whose slices are NumPy's when asked, as a device array's are."""

    def __init__(self, torch: Any, source: Any) -> None:
        self.torch, self.source = torch, source

    def __getitem__(self, part: slice) -> Downloaded:
        return Downloaded(self.torch, self.source[part])

    def numpy(self) -> np.ndarray:
        source = self.source.contiguous()
        for kind, (_, plain, name) in CARRIED.items():
            if source.dtype == getattr(self.torch, name):
                return source.view(getattr(self.torch, plain)).cpu().numpy().view(kind)
        return source.cpu().numpy()


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


def remote(job: Job, rows: list[int], form: str = "bf16") -> int:
    """Bytes of the rows to or from other ranks."""
    return (sum(rows) - rows[job.rank.index]) * row_bytes(form, job.tokens.shape[1])


# ---- the peers


def nccl_rows(torch: Any, job: Job, work: Work) -> Phases:
    """all_to_all_single of a row for each destination rank, gathered by index_select; back, and index_add of what returns."""
    del work
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


def nccl_experts(torch: Any, job: Job, work: Work) -> Phases:
    """all_to_all_single of a row for each selected expert, with the permutations before and after that make the rows expert-major."""
    dist = torch.distributed
    ids, weights = job.ids[job.mine].ravel(), job.weights[job.mine].ravel()
    pairs = np.argsort(ids, kind="stable")[int((ids < 0).sum()) :]
    source = pairs // work.settings.top_k
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


def gather_scatter(torch: Any, job: Job, work: Work) -> Phases:
    """Every token to every rank, and a reduce-scatter of every rank's sums of every token."""
    del work
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


def symmetric_memory(torch: Any, job: Job, work: Work) -> Phases:
    """PyTorch's symmetric memory: index_select straight into each peer's buffer, between two barriers on the device; copies back alike."""
    del work
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


def all_to_all_vdev(torch: Any, job: Job, work: Work) -> Phases:
    """PyTorch's all_to_all_vdev over NVSHMEM: rows once a rank, gathered by index_select; it has no combine."""
    del work
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


PEERS: dict[str, Peer] = {
    "NCCL all-to-all once a rank": nccl_rows,
    "NCCL all-to-all per expert": nccl_experts,
    "NCCL all-gather and reduce-scatter": gather_scatter,
    "PyTorch symmetric memory": symmetric_memory,
    "PyTorch all_to_all_vdev": all_to_all_vdev,
}
# Needs another backend of PyTorch's symmetric memory, which a process chooses once.
APART = ("PyTorch all_to_all_vdev",)
