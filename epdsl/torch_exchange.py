"""Dispatch and combine of PyTorch tensors, as operations that `torch.compile` traces and autograd differentiates.

    exchange = TorchExchange(rank, hidden=7168, n_experts=256, top_k=8, max_tokens_per_rank=4096)
    received = exchange.dispatch(x, topk_idx, topk_weights)
    y = ...                                     # a row for each of received.rows, summed over this rank's experts
    out = exchange.combine(y, received)         # [n_tokens, hidden]

A row is sent once to each rank that has an expert of its token, and a token's rows are summed over those ranks: so the gradient of a
dispatch is a combine of the rows' gradients, and that of a combine a dispatch of the sums', to any order. The operations are collective,
forward and backward: every rank calls the same ones and asks for gradients of the same inputs.

PyTorch is imported when the first exchange is made.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epdsl.moe_throughput import ThroughputHandle, ThroughputMoE

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank

_exchanges: weakref.WeakValueDictionary[int, TorchExchange] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_registering = threading.Lock()
# An f32 is the sum of so many bf16, which a sum with zeros of other ranks leaves as they are.
PARTS = 3


@dataclass(frozen=True)
class Received:
    """What a dispatch brought: tensors of their own, in order of (source rank, token).

    rows        [max_rows, hidden] bf16; rows that nobody sent are 0
    topk_idx    [max_rows, top_k] i32: this rank's experts by their number here, -1 for selections of other ranks and in empty rows
    weights     [max_rows, top_k] f32: 0 for selections of other ranks and in empty rows
    rank_rows   [n_ranks + 1] i32: where each source's rows begin; the last is their number
    places      what the combine needs to find the way back
    sent_ids    [n_tokens, top_k] i32: the routing that was dispatched
    """

    rows: Any
    topk_idx: Any
    weights: Any
    rank_rows: Any
    places: tuple[Any, Any]
    sent_ids: Any


class TorchExchange:
    """The throughput mode's exchange (`ThroughputMoE`) for PyTorch. Every rank makes it with the same arguments.

    Raises ValueError where `hidden` is too small to carry the gradients of the weights.
    """

    def __init__(self, rank: Rank, *, hidden: int, n_experts: int, top_k: int, max_tokens_per_rank: int, **tuning: Any) -> None:
        if hidden < PARTS * top_k:
            raise ValueError(f"hidden={hidden} is less than {PARTS} * top_k = {PARTS * top_k}, which the weights' gradients take of a row")
        self.rank = rank
        self.layer = ThroughputMoE(rank, hidden=hidden, n_experts=n_experts, top_k=top_k, max_tokens_per_rank=max_tokens_per_rank, **tuning)
        with _registering:
            self._ops = _operations()
        self.number = next(_numbers)
        _exchanges[self.number] = self
        k = self.layer.kernel
        self.max_rows, self.hidden, self.top_k, self.max_tokens = k.max_rows, hidden, top_k, max_tokens_per_rank

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> Received:
        """x [n, hidden] bf16, topk_idx [n, top_k] i32 (-1 for none), topk_weights [n, top_k] f32, contiguous and on this rank's device.

        x and topk_weights get gradients: those of the weights flow through `Received.weights`.
        """
        rows, ids, weights, rank_rows, *places = self._ops.dispatch(x, topk_idx, topk_weights, self.number)
        return Received(rows, ids, weights, rank_rows, (places[0], places[1]), topk_idx)

    def combine(self, y: Any, received: Received) -> Any:
        """The sums of each token's rows over the ranks, [n, hidden] bf16. y [max_rows, hidden] bf16 gets a gradient."""
        return self._ops.combine(y, received.sent_ids, received.rank_rows, *received.places, self.number)

    def close(self) -> None:
        """Collective: frees the buffers."""
        self.layer.close()
        _exchanges.pop(self.number, None)

    # ---- what the operations do

    def _finish(self) -> None:
        # A simulated kernel runs while the host waits; a GPU's is in PyTorch's stream, like what reads its results.
        if self.rank.device.info.kind == "sim":
            self.rank.synchronize()

    def run_dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[Any, ...]:
        """Dispatches, and copies what came out of the buffers, which the second dispatch after it overwrites."""
        torch = _torch()
        handle = self.layer.dispatch(x, topk_idx, topk_weights)
        self._finish()
        rows, ids, weights, token, rank_rows, row_of = (
            torch.from_dlpack(array)
            for array in (handle.rows, handle.topk_idx, handle.weights, handle.token, handle.rank_rows, handle.row_of)
        )
        valid = (torch.arange(self.max_rows, device=rows.device, dtype=torch.int32) < rank_rows[-1]).unsqueeze(1)
        own = torch.where(valid, ids, -1)
        return (
            torch.where(valid, rows, 0),
            own,
            torch.where(own >= 0, weights, 0),
            rank_rows.clone(),
            token.clone(),
            row_of.clone(),
        )

    def run_combine(self, y: Any, n_tokens: int, rank_rows: Any, token: Any, row_of: Any) -> Any:
        """The combine of a dispatch whose places these are."""
        torch = _torch()
        if tuple(y.shape) != (self.max_rows, self.hidden):
            raise ValueError(f"combine: y is of shape {tuple(y.shape)}, expected {(self.max_rows, self.hidden)}: a row for each of rows")
        none: Any = None
        handle = ThroughputHandle(none, none, none, none, token, rank_rows, row_of, none, n_tokens)
        out = torch.empty((max(n_tokens, 1), self.hidden), dtype=torch.bfloat16, device=y.device)
        self.layer.combine(y.contiguous(), handle, out=out)
        self._finish()
        # An operation's result may be no view of another tensor.
        return out if n_tokens else out[:0].clone()

    def send_numbers_back(self, numbers: Any, ids: Any, n_tokens: int, places: tuple[Any, ...]) -> Any:
        """[max_rows, top_k] f32 at this rank's selections to [n_tokens, top_k] at the source, exactly, in a combine's rows."""
        torch = _torch()
        rest = torch.where(ids >= 0, numbers, 0)
        packed = torch.zeros((self.max_rows, self.hidden), dtype=torch.bfloat16, device=rest.device)
        for part in range(PARTS):
            piece = rest.to(torch.bfloat16)
            packed[:, part * self.top_k : (part + 1) * self.top_k] = piece
            rest = rest - piece.float()
        back = self.run_combine(packed, n_tokens, *places).float()
        return sum(back[:, part * self.top_k : (part + 1) * self.top_k] for part in range(PARTS))


def _exchange(number: int) -> TorchExchange:
    found = _exchanges.get(number)
    if found is None:
        raise RuntimeError(f"exchange {number} is closed or belongs to another process; make it again")
    return found


def _same_device(*tensors: Any) -> None:
    # PyTorch takes what is traced, and what is on "meta", for whatever else an operation is given.
    if len(places := sorted({str(tensor.device) for tensor in tensors})) > 1:
        raise ValueError(f"the tensors lie on {' and '.join(places)}; all of them must be on this rank's device")


def _torch() -> Any:
    # Not for the type checker: it is not among this project's dependencies.
    return importlib.import_module("torch")


_PLACES = "Tensor rank_rows, Tensor token, Tensor row_of, int exchange"
_SIX = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


@functools.cache
def _operations() -> Any:
    """Registers the operations with PyTorch, once."""
    torch = _torch()

    def registered(name: str, schema: str, run: Any, fake: Any) -> Any:
        made = torch.library.custom_op(f"epdsl::{name}", run, mutates_args=(), schema=schema)
        made.register_fake(fake)
        return made

    def dispatch(x: Any, topk_idx: Any, topk_weights: Any, exchange: int) -> Any:
        return _exchange(exchange).run_dispatch(x, topk_idx, topk_weights)

    def dispatch_fake(x: Any, topk_idx: Any, topk_weights: Any, exchange: int) -> Any:
        _same_device(x, topk_idx, topk_weights)
        made = _exchange(exchange)
        n_ranks, i32 = made.rank.size, torch.int32
        return (
            x.new_empty((made.max_rows, made.hidden)),
            topk_idx.new_empty((made.max_rows, made.top_k)),
            topk_weights.new_empty((made.max_rows, made.top_k)),
            x.new_empty((n_ranks + 1,), dtype=i32),
            x.new_empty((made.max_rows,), dtype=i32),
            x.new_empty((made.max_tokens, n_ranks), dtype=i32),
        )

    def dispatch_keep(ctx: Any, inputs: Any, output: Any) -> None:
        _, topk_idx, _, ctx.exchange = inputs
        ctx.save_for_backward(topk_idx, output[1], *output[3:])
        ctx.mark_non_differentiable(output[1], *output[3:])

    def dispatch_backward(ctx: Any, rows: Any, _ids: Any, weights: Any, *_others: Any) -> Any:
        topk_idx, ids, *places = ctx.saved_tensors
        x = torch.ops.epdsl.combine(rows, topk_idx, *places, ctx.exchange) if ctx.needs_input_grad[0] else None
        back = torch.ops.epdsl.numbers_back(weights, ids, topk_idx, *places, ctx.exchange) if ctx.needs_input_grad[2] else None
        return x, None, back, None

    def combine(y: Any, topk_idx: Any, rank_rows: Any, token: Any, row_of: Any, exchange: int) -> Any:
        return _exchange(exchange).run_combine(y, topk_idx.shape[0], rank_rows, token, row_of)

    def combine_fake(y: Any, topk_idx: Any, rank_rows: Any, token: Any, row_of: Any, exchange: int) -> Any:
        _same_device(y, topk_idx, rank_rows)
        return y.new_empty((topk_idx.shape[0], y.shape[1]))

    def combine_keep(ctx: Any, inputs: Any, output: Any) -> None:
        _, topk_idx, *_, ctx.exchange = inputs
        ctx.save_for_backward(topk_idx)

    def combine_backward(ctx: Any, out: Any) -> Any:
        (topk_idx,) = ctx.saved_tensors
        weights = torch.zeros(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
        rows = torch.ops.epdsl.dispatch(out.contiguous(), topk_idx, weights, ctx.exchange)[0]
        return rows, None, None, None, None, None

    def back(numbers: Any, ids: Any, topk_idx: Any, rank_rows: Any, token: Any, row_of: Any, exchange: int) -> Any:
        return _exchange(exchange).send_numbers_back(numbers, ids, topk_idx.shape[0], (rank_rows, token, row_of))

    def back_fake(numbers: Any, ids: Any, topk_idx: Any, rank_rows: Any, token: Any, row_of: Any, exchange: int) -> Any:
        return numbers.new_empty(topk_idx.shape)

    def back_keep(ctx: Any, inputs: Any, output: Any) -> None:
        *_, ctx.exchange = inputs
        ctx.save_for_backward(inputs[2])

    def back_backward(ctx: Any, out: Any) -> Any:
        (topk_idx,) = ctx.saved_tensors
        x = torch.zeros((topk_idx.shape[0], _exchange(ctx.exchange).hidden), dtype=torch.bfloat16, device=topk_idx.device)
        return torch.ops.epdsl.dispatch(x, topk_idx, out.contiguous(), ctx.exchange)[2], None, None, None, None, None, None

    made = registered("dispatch", f"(Tensor x, Tensor topk_idx, Tensor topk_weights, int exchange) -> {_SIX}", dispatch, dispatch_fake)
    made.register_autograd(dispatch_backward, setup_context=dispatch_keep)
    made = registered("combine", f"(Tensor y, Tensor topk_idx, {_PLACES}) -> Tensor", combine, combine_fake)
    made.register_autograd(combine_backward, setup_context=combine_keep)
    made = registered("numbers_back", f"(Tensor numbers, Tensor ids, Tensor topk_idx, {_PLACES}) -> Tensor", back, back_fake)
    made.register_autograd(back_backward, setup_context=back_keep)
    return torch.ops.epdsl
