"""DeepEP, where it is installed, as peers of `exchange.py`: its normal mode (rows once a rank) and its low-latency mode (expert-major).

The normal mode is timed with the handle of a dispatch before, which holds the layout and the counts: what is left out is the exchange of
counts that the host waits for. Its chunk sizes are those that it recommends for the number of ranks. The low-latency mode leaves nothing
out.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from exchange_peers import Downloaded, Peer, Phase, Phases, Plan, Work, remote, row_bytes, sums_here, tensor

from epdsl.bench_job import Job, Settings

# Its authors' number; the low-latency kernels take what they need.
SMS = 24
# The buffers of the low-latency mode are made once, for as many tokens of each rank.
LOW_LATENCY_MOST = 512
MISSING = (
    "DeepEP is not installed, so it is not timed: build version 1.2.1 from its own repository (deepseek-ai/DeepEP) with "
    "`TORCH_CUDA_ARCH_LIST=9.0 pip install --no-build-isolation .`, where the nvidia-nvshmem package and the headers of libibverbs are "
    "installed for its low-latency mode"
)


def missing() -> str:
    """Why DeepEP is not here; empty where it is."""
    return "" if importlib.util.find_spec("deep_ep") else MISSING


# ---- the normal mode


def normal(torch: Any, job: Job, work: Work) -> Phases:
    """BF16 both ways and FP8 with given scales on SMS multiprocessors; then the same on the others of the sweep."""
    import deep_ep as library  # pyright: ignore[reportMissingImports]

    most = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    counts = [SMS, *(n for n in work.sweep if n != SMS and usable(n, most))]
    ranks, hidden = job.rank.size, job.tokens.shape[1]
    configs = {sms: _configs(library, sms, ranks) for sms in counts}
    room = max(config.get_nvl_buffer_size_hint(2 * hidden, ranks) for pair in configs.values() for config in pair)
    given = _Given.of(torch, job)
    made = library.Buffer(torch.distributed.group.WORLD, num_nvl_bytes=room, explicitly_destroy=True)
    # All ranks close a peer together, but an error may be one rank's alone, which must not wait for the others here.
    with contextlib.suppress(GeneratorExit):
        for sms in counts:
            yield from _normal(torch, job, work.settings, made, given, sms, *configs[sms])
    made.destroy()


@dataclass(frozen=True)
class _Given:
    """What the normal mode is given, as tensors: this rank's tokens and routing, their codes and scales; and the sums that it returns."""

    x: Any
    ids: Any
    weights: Any
    pair: tuple[Any, ...]
    sums: Any

    @staticmethod
    def of(torch: Any, job: Job) -> _Given:
        own = (job.tokens, job.ids.astype(np.int64), job.weights, *job.quantised)
        x, ids, weights, *pair = (tensor(torch, part[job.mine]) for part in own)
        return _Given(x, ids, weights, tuple(pair), tensor(torch, sums_here(job, job.once_a_rank)))


def usable(sms: int, most: int) -> bool:
    """Whether the normal mode takes so many of a device's multiprocessors: it uses them in pairs."""
    return 0 < sms <= most and sms % 2 == 0


def _configs(library: Any, sms: int, ranks: int) -> tuple[Any, Any]:
    library.Buffer.set_num_sms(sms)
    return library.Buffer.get_dispatch_config(ranks), library.Buffer.get_combine_config(ranks)


def _normal(torch: Any, job: Job, settings: Settings, made: Any, given: _Given, sms: int, sending: Any, returning: Any) -> Phases:
    plan, hidden, arrive = Plan.of(job), job.tokens.shape[1], len(job.once_a_rank)
    to_ranks, _, to_experts, in_rank, _ = made.get_dispatch_layout(given.ids, settings.experts)
    layout = {"num_tokens_per_rank": to_ranks, "num_tokens_per_expert": to_experts, "is_token_in_rank": in_rank}
    handle = made.dispatch(given.x, topk_idx=given.ids, topk_weights=given.weights, config=sending, **layout)[4]
    kept: dict[str, Any] = {}

    def dispatch() -> None:
        kept["rows"] = made.dispatch(given.x, handle=handle, config=sending)[0]

    def check() -> None:
        assert len(kept["rows"]) == arrive, f"rank {job.rank.index}: {len(kept['rows'])} rows arrived, not {arrive}"
        job.check_rows("rows", Downloaded(torch, kept["rows"]), job.tokens, job.once_a_rank)

    own = arrive * row_bytes("bf16", hidden)
    yield Phase("dispatch", dispatch, check, remote(job, plan.to), sms, own_bytes=own)

    def combine() -> None:
        kept["out"] = made.combine(given.sums, handle, config=returning)[0]

    yield Phase("combine", combine, lambda: job.check_sums(Downloaded(torch, kept["out"])), remote(job, plan.back), sms, own_bytes=own)

    def dispatch_fp8() -> None:
        kept["fp8"] = made.dispatch(given.pair, handle=handle, config=sending)[0]

    def check_fp8() -> None:
        for what, got, wanted in zip(("elements", "scales"), kept["fp8"], job.quantised, strict=True):
            job.check_rows(what, Downloaded(torch, got), wanted, job.once_a_rank)

    own = arrive * row_bytes("fp8", hidden)
    yield Phase("dispatch", dispatch_fp8, check_fp8, remote(job, plan.to, "fp8"), sms, "fp8", own)


# ---- the low-latency mode

# The buffer that is kept between jobs: NVSHMEM is set up once in a process.
_open: list[Any] = []


def low_latency(torch: Any, job: Job, work: Work) -> Phases:
    """Dispatch that quantises, dispatch in BF16, combine with the router's weights; nothing for more than LOW_LATENCY_MOST tokens."""
    import deep_ep as library  # pyright: ignore[reportMissingImports]

    if job.per_rank > LOW_LATENCY_MOST:
        return
    experts, ranks, hidden = work.settings.experts, job.rank.size, job.tokens.shape[1]
    if not _open:
        room = library.Buffer.get_low_latency_rdma_size_hint(LOW_LATENCY_MOST, hidden, ranks, experts)
        options = {"low_latency_mode": True, "num_qps_per_rank": job.local, "explicitly_destroy": True}
        _open.append(library.Buffer(torch.distributed.group.WORLD, num_rdma_bytes=room, **options))
    made = _open[0]
    # Slots of all ranks together are a multiple of four.
    slots = padded(job.per_rank)
    made.clean_low_latency_buffer(slots, hidden, experts)
    x, ids = tensor(torch, job.tokens[job.mine]), tensor(torch, job.ids[job.mine].astype(np.int64))
    weights = tensor(torch, job.weights[job.mine])
    chosen = job.ids[job.mine]
    here = chosen // job.local == job.rank.index
    sent, selected = int(((chosen >= 0) & ~here).sum()), int((chosen >= 0).sum())
    got: dict[str, Any] = {}

    def dispatch(fp8: bool) -> Callable[[], None]:
        def launch() -> None:
            got["rows"], got["counts"], got["handle"], _, _ = made.low_latency_dispatch(x, ids, slots, experts, use_fp8=fp8)

        return launch

    def arrived() -> list[np.ndarray]:
        """The token of each row in use, for each local expert, as the last dispatch says."""
        sources, ranges = (part.cpu().numpy() for part in got["handle"][:2])
        found = arrivals(sources, ranges, job.per_rank)
        token, expert = job.expert_major(own_first=False)
        counts = got["counts"].cpu().numpy()
        for e, tokens in enumerate(found):
            wanted = token[expert == e]
            assert len(tokens) == counts[e] and sorted(tokens) == sorted(wanted), (
                f"rank {job.rank.index}: wrong tokens for local expert {e}"
            )
        return found

    def check() -> None:
        for e, tokens in enumerate(arrived()):
            job.check_rows(f"elements for local expert {e}", Downloaded(torch, got["rows"][e]), job.tokens, tokens)

    def check_fp8() -> None:
        for e, tokens in enumerate(arrived()):
            for what, rows, wanted in zip(("elements", "scales"), got["rows"], job.quantised, strict=True):
                job.check_rows(f"{what} for local expert {e}", Downloaded(torch, rows[e]), wanted, tokens)

    sizes = {form: row_bytes(form, hidden) for form in ("bf16", "fp8")}
    # Its rows carry 16 bytes of their own, which its benchmark counts in FP8.
    yield Phase("dispatch", dispatch(True), check_fp8, sent * sizes["fp8"], None, "fp8", selected * (sizes["fp8"] + 16))
    yield Phase("dispatch", dispatch(False), check, sent * sizes["bf16"], own_bytes=selected * sizes["bf16"])
    # Rows that are not in use are NaN: one that a combine reads shows.
    y = torch.full((job.local, ranks * slots, hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    for e, tokens in enumerate(arrived()):
        if len(tokens):
            y[e, : len(tokens)].copy_(tensor(torch, job.answer(tokens, np.full(len(tokens), e))))
    handle, out = got["handle"], torch.empty_like(x)
    back = int((job.selected[0] // job.per_rank != job.rank.index).sum())
    yield Phase(
        "combine",
        lambda: made.low_latency_combine(y, ids, weights, handle, out=out),
        lambda: job.check_sums(Downloaded(torch, out)),
        back * sizes["bf16"],
        own_bytes=selected * sizes["bf16"],
    )


def padded(tokens: int) -> int:
    """Tokens of a rank, up to the next multiple of four: the slots that the low-latency mode can be asked for."""
    return -(-tokens // 4) * 4


def arrivals(sources: np.ndarray, ranges: np.ndarray, per_rank: int) -> list[np.ndarray]:
    """The token of each row in use, in order of rows, for each local expert.

    sources  [local experts, slots]: each row's token of its source rank
    ranges   [local experts, ranks] i64: first row << 32 | rows, of each source rank
    per_rank tokens of a rank: rank r's token t is r * per_rank + t of the result
    """
    made: list[np.ndarray] = []
    for of_rows, of_ranks in zip(sources, ranges, strict=True):
        tokens = np.full(int((of_ranks & 0xFFFFFFFF).sum()), -1, np.int64)
        for rank, packed in enumerate(of_ranks.tolist()):
            first, count = packed >> 32, packed & 0xFFFFFFFF
            tokens[first : first + count] = rank * per_rank + of_rows[first : first + count]
        made.append(tokens)
    return made


def close() -> None:
    """Collective: gives back what is kept between jobs."""
    while _open:
        _open.pop().destroy()


PEERS: dict[str, Peer] = {"DeepEP": normal, "DeepEP low-latency": low_latency}
# NVSHMEM is set up by the library itself, once in a process.
APART = ("DeepEP low-latency",)
