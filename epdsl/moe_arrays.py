"""Arrays given to the expert-parallel layer: what they hold, whether it is right, and bringing them to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank


def rows_of(name: str, value: Any) -> int:
    """Rows of an array of two axes. Raises ValueError for anything else."""
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) != 2:
        raise ValueError(
            f"{name} must be an array of two axes, got {type(value).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}"
        )
    return int(shape[0])


def dtype_of(value: Any) -> str:
    """Element type of a device array, a NumPy array or a torch tensor."""
    from epdsl_runtime.dtypes import dtype_name

    found = getattr(value, "dtype_name", None)
    if found is not None:
        return found
    name = str(getattr(value, "dtype", type(value).__name__)).rsplit(".", 1)[-1]
    return "bf16" if name == "bfloat16" else dtype_name(name)


def check_array(name: str, value: Any, dtype: str, shape: tuple[int, int]) -> None:
    """Raises ValueError or TypeError, saying what was found and what is needed."""
    rows_of(name, value)
    found = tuple(int(n) for n in value.shape)
    if found != shape:
        raise ValueError(f"{name} has shape {found}, expected {shape}")
    if (got := dtype_of(value)) != dtype:
        raise TypeError(f"{name} holds {got}, expected {dtype}")


def on_device(rank: Rank, value: Any, dtype: str) -> Any:
    """`value` uploaded when it is a NumPy array, as it is otherwise."""
    return rank.array(np.ascontiguousarray(value), dtype) if isinstance(value, np.ndarray) else value


def as_bytes(rank: Rank, value: Any) -> Any:
    """A device array's memory as u8. An array of another library is wrapped by its address.

    Raises TypeError for what is no array on this device.
    """
    if hasattr(value, "dtype_name"):
        return value.view("u8")
    from epdsl_runtime.binding import Address
    from epdsl_runtime.foreign import foreign_array

    found = foreign_array("tokens", value, rank.device)
    if found is None:
        raise TypeError(f"{type(value).__name__} is no array that a kernel can read")
    return Address(found.address)
