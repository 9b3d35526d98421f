"""`epdsl build`: kernels as artifacts that run without the compiler."""

from __future__ import annotations

import itertools
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_family import (
    LAYER,
    CombineSchedule,
    CombineScheduleOption,
    Completion,
    CompletionOption,
    CopyRoleSplit,
    FinalLayout,
    FoldScales,
    Format,
    FusedSharedExpert,
    Order,
    OrderingOption,
    OutputType,
    ProdReserve,
    SendJoinNamed,
    SkipA2A,
    SmSchedule,
    SmScheduleOption,
    Staged,
    TileClaims,
    TokenFormatOption,
    Unreduced,
    layer_of,
)
from .cli_tools import Failure, Json, load_kernel, progress_of, show_table, usage

OF_A_FAMILY = ("hidden", "experts", "topk", "ranks", "tokens", "blocks", "threads", "completion", "output_type", *LAYER)
"""Parameters of the command that only mean something with --family."""


class Family(StrEnum):
    """Kernel families that `build` knows by name."""

    dispatch = "dispatch"
    combine = "combine"


def build(
    context: typer.Context,
    kernel: Annotated[str | None, typer.Argument(help="FILE.py:NAME")] = None,
    target: Annotated[list[str], typer.Option("--target", help="sm_90, gfx942, sim:nvidia, ...; may be repeated or comma-separated.")] = [],  # noqa: B006
    output: Annotated[Path, typer.Option("-o", "--output", help="Directory; a kernel goes to OUTPUT/TARGET/KERNEL.")] = Path("artifacts"),
    family: Annotated[list[Family], typer.Option("--family", help="Write the kernels of a family: dispatch, combine.")] = [],  # noqa: B006
    hidden: Annotated[int, typer.Option(min=8, help="For --family: elements of a token.")] = 7168,
    experts: Annotated[int, typer.Option(min=1, help="For --family: experts of the layer.")] = 256,
    topk: Annotated[int, typer.Option("--topk", min=1, help="For --family: experts of a token.")] = 8,
    ranks: Annotated[int, typer.Option(min=1, help="For --family: ranks.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="For --family: most tokens of a rank.")] = 128,
    blocks: Annotated[int, typer.Option(min=2, help="For --family: blocks of a launch.")] = 64,
    threads: Annotated[int, typer.Option(min=64, help="For --family: threads of a block.")] = 512,
    completion: CompletionOption = Completion.rank,
    ordering: OrderingOption = Order.acq_rel,
    token_format: TokenFormatOption = Format.bf16,
    fold_scales: FoldScales = False,
    tile_claims: TileClaims = 1,
    staged: Staged = False,
    fused_shared_expert: FusedSharedExpert = False,
    skip_a2a: SkipA2A = False,
    ep_final_layout: FinalLayout = False,
    ep_prod_reserve: ProdReserve = False,
    ep_copy_role_split: CopyRoleSplit = False,
    ep_send_join_named: SendJoinNamed = False,
    sm_schedule: SmScheduleOption = SmSchedule.auto,
    combine_schedule: CombineScheduleOption = CombineSchedule.auto,
    unreduced: Unreduced = False,
    output_type: Annotated[OutputType, typer.Option(help="For --family: element type of the combined tokens.")] = OutputType.bf16,
    as_json: Json = False,
) -> None:
    """Compile kernels to artifacts that `epdsl_runtime` loads without a compiler.

    With --family the options of `epdsl run` that choose a kernel are options here too.
    """
    layer = layer_of(locals())
    from .kernel_object import compile_all
    from .moe_config import MoEConfig

    if (kernel is None) == (not family):
        usage("build needs either FILE.py:NAME or --family")
    given = [name for name in OF_A_FAMILY if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if kernel is not None and given:
        usage(f"--{given[0].replace('_', '-')} is for --family, and {kernel} names a kernel of its own; leave one of them out")
    targets = list(dict.fromkeys(name for given in target for name in given.split(",") if name))
    if not targets:
        usage("build needs --target, such as --target sm_90 --target gfx942")
    try:
        kernels: dict[str, Any] = {}
        if kernel is not None:
            found = load_kernel(kernel)
            kernels[found.__name__] = found
        else:
            config = MoEConfig(
                hidden=hidden,
                n_experts=experts,
                top_k=topk,
                max_tokens_per_rank=tokens,
                n_ranks=ranks,
                num_threads=threads,
                n_sms=blocks,
                completion=completion.value,
                output_type=output_type.value,
                **layer,
            )
            if Family.dispatch in family:
                made = config.dispatch_kernel
                kernels |= {"dispatch_async": made.dispatch_async, "dispatch_wait": made.dispatch_wait, "dispatch": made.dispatch}
            if Family.combine in family:
                made = config.combine_kernel
                kernels |= {"combine_async": made.combine_async, "combine_wait": made.combine_wait, "combine": made.combine}
    except (Failure, ValueError, NotImplementedError) as error:
        usage(str(error))
    try:
        # Before the first kernel is compiled, which takes a while.
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        usage(f"{output} cannot be the output directory: {error.strerror}; name another with -o")
    written: list[dict[str, Any]] = []
    with progress_of("compiling", len(targets) * len(kernels)) as progress:
        made = compile_all(kernels.values(), targets)
        for each, name in itertools.product(targets, kernels):
            try:
                artifact = next(made)
            except ValueError as error:
                usage(str(error))
            where = artifact.save(output / each.replace(":", "_") / name)
            written.append({"kernel": name, "target": each, "bytes": len(artifact.binary), "path": str(where)})
            if progress:
                with Path(progress).open("ab") as file:
                    file.write(b".")
    if as_json:
        typer.echo(json.dumps(written, indent=1))
    else:
        show_table(
            "", ("kernel", "target", "bytes", "written to"), [(w["kernel"], w["target"], f"{w['bytes']:,}", w["path"]) for w in written]
        )
