"""`epdsl kernels`: the kernel family, read from its dataclasses."""

from __future__ import annotations

import importlib
import json
from dataclasses import MISSING, Field, fields
from typing import Any

import typer

from .cli_tools import Json, show_table

FAMILY = (
    ("dispatch", "EPDispatchKernel"),
    ("combine", "EPCombineKernel"),
    ("low_latency", "LowLatencyExchange"),
    ("stamped", "StampedExchange"),
    ("throughput", "ThroughputExchange"),
    ("expert_major", "ExpertMajorExchange"),
    ("fused_example", "EPDispatchConsume"),
    ("expert", "SampleExperts"),
    ("multi_gpu", "MultiGpuAllReduce"),
    ("token_format", "BF16TokenFormat"),
    ("quantized_format", "BlockwiseFP8TokenFormat"),
    ("quantized_format", "MXFP8TokenFormat"),
    ("quantized_format", "MXFP4TokenFormat"),
    ("quantized_format", "NVFP4TokenFormat"),
    ("dispatch_parameters", "EPRoleSplit"),
    ("trace", "NullTrace"),
    ("trace", "RingTrace"),
)
"""Modules of `epdsl.kernels`, and the dataclasses of each whose fields are a kernel's compile-time parameters."""


def kernel_names(family: type) -> list[str]:
    """The kernels that a dataclass has, in the order of its text."""
    from .kernel_object import Kernel

    return [name for base in family.__mro__ for name, value in vars(base).items() if isinstance(value, Kernel)]


def described(module: str, name: str) -> dict[str, Any]:
    """One dataclass: its module, kernels, parameters with their types and defaults, and what it is in a line."""
    family = getattr(importlib.import_module(f"epdsl.kernels.{module}"), name)
    return {
        "name": name,
        "module": family.__module__,
        "kernels": kernel_names(family),
        "parameters": [
            {"name": f.name, "type": str(f.type), "default": _default(f), "required": _required(f)} for f in fields(family) if f.init
        ],
        "summary": (family.__doc__ or "").strip().splitlines()[0],
    }


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _default(field: Field[Any]) -> Any:
    """A field's default value, None where it has none."""
    if _required(field):
        return None
    return field.default if field.default_factory is MISSING else field.default_factory()


def kernels(as_json: Json = False) -> None:
    """List the kernel family: its kernels, their compile-time parameters and defaults."""
    listed = [described(module, name) for module, name in FAMILY]
    if as_json:
        typer.echo(json.dumps(listed, indent=1, default=repr))
        return
    for family in listed:
        rows = [(p["name"], p["type"], "required" if p["required"] else repr(p["default"])) for p in family["parameters"]]
        what = f": {', '.join(family['kernels'])}" if family["kernels"] else ""
        title = f"{family['module']}.{family['name']}{what}\n{family['summary']}"
        if rows:
            show_table(title, ("parameter", "type", "default"), rows)
        else:
            typer.echo(f"{title}\n\n  no parameters\n")
