"""The kernel family's parameters as options of the command line, the same for `epdsl run` and `epdsl build`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer


class Completion(StrEnum):
    """How a rank learns that everything for it has arrived."""

    rank = "rank"
    expert = "expert"
    every = "every"


class Format(StrEnum):
    """How tokens travel in the dispatch."""

    bf16 = "bf16"
    fp8 = "fp8"
    mxfp8 = "mxfp8"
    mxfp4 = "mxfp4"
    nvfp4 = "nvfp4"


class Order(StrEnum):
    acq_rel = "acq_rel"
    seed = "seed"


class SmSchedule(StrEnum):
    auto = "auto"
    round_robin = "round_robin"
    proportional = "proportional"


class CombineSchedule(StrEnum):
    auto = "auto"
    legacy = "legacy"
    balanced = "balanced"


class OutputType(StrEnum):
    bf16 = "bf16"
    f32 = "f32"


CompletionOption = Annotated[
    Completion, typer.Option(help="Completion per rank, per expert with an elected release, or a release for every expert.")
]
OrderingOption = Annotated[Order, typer.Option(help="Of completion per expert; seed is the original's racy one.")]
TokenFormatOption = Annotated[Format, typer.Option(help="How tokens travel; all but bf16 quantise.")]
FoldScales = Annotated[bool, typer.Option("--fold-scales", help="Output scales in tiles of 128 x 4 (mxfp8, mxfp4, nvfp4).")]
TileClaims = Annotated[int, typer.Option(min=1, help="Claims that a tile of received rows takes, each for a part of every row.")]
Staged = Annotated[bool, typer.Option("--staged", help="Received rows pass through shared memory by the copy engine.")]
FusedSharedExpert = Annotated[bool, typer.Option("--fused-shared-expert", help="A shared expert's rows beside the routed ones.")]
SkipA2A = Annotated[bool, typer.Option("--skip-a2a", help="Every rank has all tokens and keeps to its own experts.")]
FinalLayout = Annotated[bool, typer.Option("--ep-final-layout", help="Sources write rows to their final place.")]
ProdReserve = Annotated[bool, typer.Option("--ep-prod-reserve", help="Places by one reservation a block; with --ep-final-layout.")]
CopyRoleSplit = Annotated[bool, typer.Option("--ep-copy-role-split", help="Four warps send, the others pack.")]
SendJoinNamed = Annotated[bool, typer.Option("--ep-send-join-named", help="Pack and send join on named barrier 3.")]
SmScheduleOption = Annotated[SmSchedule, typer.Option(help="Which blocks copy which expert.")]
CombineScheduleOption = Annotated[CombineSchedule, typer.Option(help="How the combine's sending is divided.")]
Unreduced = Annotated[bool, typer.Option("--unreduced", help="Combine without summing.")]
Output = Annotated[OutputType, typer.Option(help="Element type of the combined tokens.")]

LAYER = (
    "ordering", "token_format", "fold_scales", "tile_claims", "staged", "fused_shared_expert", "skip_a2a", "ep_final_layout",
    "ep_prod_reserve", "ep_copy_role_split", "ep_send_join_named", "sm_schedule", "combine_schedule", "unreduced",
)  # fmt: skip
"""Fields of `MoEConfig` whose options have their name."""


def layer_of(given: dict[str, Any]) -> dict[str, Any]:
    """Of a command's parameters, those that are fields of a layer's configuration, as plain values."""
    return {name: given[name].value if isinstance(given[name], StrEnum) else given[name] for name in LAYER}
