"""Arrays given to the expert-parallel layer: what they hold, whether it is right, and bringing them to the device."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank


def agreed_fields(kernel: Any, except_for: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a kernel family that must be equal on every rank, by name."""
    return {f.name: getattr(kernel, f.name) for f in fields(kernel) if f.name not in except_for}


def rows_of(name: str, value: Any) -> int:
    """Rows of an array of two axes. Raises ValueError for anything else."""
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) != 2:
        raise ValueError(
            f"{name} must be an array of two axes, got {type(value).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}"
        )
    return int(shape[0])


def dtype_of(value: Any) -> str:
    """Element type of a device array, a NumPy array or a torch tensor: a type of the language, or the library's name of another."""
    from epdsl_runtime.dtypes import TEXTS

    found = getattr(value, "dtype_name", None)
    if found is not None:
        return found
    name = str(getattr(value, "dtype", type(value).__name__)).rsplit(".", 1)[-1]
    return TEXTS.get(name, name)


def check_array(name: str, value: Any, dtype: str, shape: tuple[int, int]) -> None:
    """Raises ValueError or TypeError, saying what was found and what is needed."""
    rows_of(name, value)
    found = tuple(int(n) for n in value.shape)
    if found != shape:
        raise ValueError(f"{name} has shape {found}, expected {shape}")
    if (got := dtype_of(value)) != dtype:
        raise TypeError(f"{name} holds {got}, expected {dtype}")


def check_tokens(kernel: Any, dtype: str, x: Any, topk_idx: Any, topk_weights: Any) -> int:
    """Tokens that a dispatch is given. `kernel` has hidden, top_k and max_tokens_per_rank. Raises ValueError or TypeError."""
    n_tokens = rows_of("x", x)
    if n_tokens > kernel.max_tokens_per_rank:
        raise ValueError(f"dispatch: {n_tokens} tokens, the layer was made for max_tokens_per_rank={kernel.max_tokens_per_rank}")
    check_array("x", x, dtype, (n_tokens, kernel.hidden))
    check_array("topk_idx", topk_idx, "i32", (n_tokens, kernel.top_k))
    check_array("topk_weights", topk_weights, "f32", (n_tokens, kernel.top_k))
    return n_tokens


def tokens_on_device(rank: Rank, dtype: str, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[Any, Any, Any]:
    """What `check_tokens` has checked, as device arrays."""
    return (
        on_device(rank, "x", x, dtype),
        on_device(rank, "topk_idx", topk_idx, "i32"),
        on_device(rank, "topk_weights", topk_weights, "f32"),
    )


def output_of(rank: Rank, out: Any, n_tokens: int, hidden: int) -> tuple[Any, Any]:
    """What a combine returns, `out` or a new array, and the same as a device array: bf16 [n_tokens or more, hidden].

    Raises ValueError or TypeError for another `out`.
    """
    if out is None:
        out = rank.empty("bf16", (max(1, n_tokens), hidden))
    if isinstance(out, np.ndarray):
        raise TypeError("out is a NumPy array, which a kernel cannot write; give a device array, such as rank.empty(...)")
    check_array("out", out, "bf16", (max(rows_of("out", out), n_tokens), hidden))
    return out, on_device(rank, "out", out, "bf16")


def check_input_scale(value: Any, has_global_scale: bool, format_name: str) -> Any:
    """A global scale as an array of one f32. A device array's number is not looked at, which would wait for the device.

    Raises ValueError or TypeError for a format without one, and for what is no such array or no finite number above 0.
    """
    if not has_global_scale:
        raise ValueError(f"input_scale is for a format with a global scale (nvfp4); this layer's {format_name} has none, leave it out")
    if isinstance(value, (int, float, np.number)):
        value = np.full(1, value, np.float32)
    shape = tuple(int(n) for n in getattr(value, "shape", ()))
    if shape != (1,):
        raise ValueError(f"input_scale has shape {shape}, expected (1,)")
    if (got := dtype_of(value)) != "f32":
        raise TypeError(f"input_scale holds {got}, expected f32")
    if isinstance(value, np.ndarray) and not (np.isfinite(value).all() and value[0] > 0):
        raise ValueError(f"input_scale is {value[0]}; it must be a finite number above 0")
    return value


def on_device(rank: Rank, name: str, value: Any, dtype: str) -> Any:
    """`value` as a device array: uploaded when it is a NumPy array, another library's without a copy. `name` is for messages."""
    if isinstance(value, np.ndarray):
        return rank.array(np.ascontiguousarray(value), dtype)
    if hasattr(value, "dtype_name"):
        return value
    from epdsl_runtime.array import borrowed

    found = borrowed(rank.device, value, name)
    if found is None:
        raise TypeError(f"{name} is a {type(value).__name__}, which is no array that a kernel can read")
    return found


def as_bytes(rank: Rank, name: str, value: Any) -> Any:
    """A device array's memory, or another library's, as u8. Raises TypeError for what is no array on this device."""
    return on_device(rank, name, value, "u8").view("u8")
