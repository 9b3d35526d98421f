"""`epdsl run`: the expert-parallel layer on every rank, verified; `epdsl trace`: what its kernels' clocks said, merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_family import (
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
    Output,
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
from .cli_tools import Json, byte_text, progress_of, show_table, time_text, usage

SIMULATED_RANKS = 8
TOKENS, TOP_K = 16, 8


def run(
    device: Annotated[str, typer.Option(help="auto, sim, sim:nvidia, sim:amd, cuda, hip, or one GPU for all ranks: cuda:0.")] = "auto",
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks; by default the GPUs present, or 8 on the simulator.")] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="Tokens of each rank; by default 16, or what --routing has.")] = None,
    hidden: Annotated[int, typer.Option(min=8, help="Elements of a token, a multiple of 8.")] = 512,
    experts: Annotated[int, typer.Option(min=1, help="Experts of the whole layer, a multiple of the ranks.")] = 64,
    topk: Annotated[int | None, typer.Option("--topk", min=1, help="Experts of a token; by default 8, or what --routing has.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of routing, tokens and the simulator's schedule.")] = 0,
    launches: Annotated[int, typer.Option(min=1, help="How often to dispatch and combine; each is verified.")] = 3,
    routing: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help=".npz with topk_idx and topk_weights of a real router.")
    ] = None,
    completion: CompletionOption = Completion.rank,
    ordering: OrderingOption = Order.acq_rel,
    token_format: TokenFormatOption = Format.bf16,
    input_scale: Annotated[float | None, typer.Option(help="The global scale of nvfp4, above 0; by default 1.")] = None,
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
    trace: Annotated[Path | None, typer.Option(dir_okay=False, help="Write every rank's phases there, for ui.perfetto.dev.")] = None,
    fused: Annotated[bool, typer.Option("--fused/--split", help="One launch for dispatch and one for combine, or two each.")] = True,
    output: Output = OutputType.bf16,
    blocks: Annotated[int | None, typer.Option(min=2, help="Blocks of a launch.")] = None,
    threads: Annotated[int | None, typer.Option(min=64, help="Threads of a block, a multiple of 64.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="While nothing goes on, say on stderr what each rank does and waits for.")] = False,
    as_json: Json = False,
) -> None:
    """Run an expert-parallel layer (dispatch, expert, combine) on every rank and verify it against NumPy.

    Exit status 1 when it disagrees, 2 for a configuration that cannot work; then nothing was launched.
    """
    layer = layer_of(locals())
    from epdsl_runtime.bootstrap import RankFailed
    from epdsl_runtime.devices import most_ranks, parse_spec
    from epdsl_runtime.driver_device import DeviceUnavailable
    from epdsl_runtime.launch import LaunchError
    from epdsl_runtime.spawn import spawn

    from .demo import RunConfig, check_routing, load_routing, rank_trace_path, run_rank
    from .moe_arrays import check_input_scale
    from .moe_config import MoEConfig

    if trace is not None and not trace.parent.is_dir():
        usage(f"--trace {trace}: {trace.parent} is no directory; make it first")
    try:
        spec = parse_spec(device)
        n_ranks = ranks or (SIMULATED_RANKS if spec.kind == "sim" else most_ranks(spec) or 1)
        loaded = load_routing(routing, n_ranks) if routing else None
        if loaded:
            check_routing(str(routing), loaded, experts)
            found = {"--topk": loaded[0].topk_idx.shape[1], "--tokens": max(r.n_tokens for r in loaded)}
            for option, given in (("--topk", topk), ("--tokens", tokens)):
                if given is not None and given != found[option]:
                    usage(f"{option} {given}, but {routing} has {found[option]}; leave {option} out")
            topk, tokens = found["--topk"], found["--tokens"]
        topk = TOP_K if topk is None else topk
        tokens = TOKENS if tokens is None else tokens
        # Refused here, before any rank is started.
        config = MoEConfig(
            hidden=hidden,
            n_experts=experts,
            top_k=topk,
            max_tokens_per_rank=max(tokens, 1),
            n_ranks=n_ranks,
            num_threads=threads or 256,
            n_sms=blocks or 8,
            completion=completion.value,
            output_type=output.value,
            **layer,
        )
        if input_scale is not None:
            check_input_scale(input_scale, config.format.has_global_scale, type(config.format).__name__)
    except (ValueError, NotImplementedError, DeviceUnavailable) as error:
        usage(str(error))
    with progress_of(f"{n_ranks} ranks on {spec}", launches) as progress:
        job = RunConfig(
            ranks=n_ranks,
            tokens=tokens,
            hidden=hidden,
            experts=experts,
            topk=topk,
            seed=seed,
            launches=launches,
            completion=completion.value,
            fused=fused,
            output_type=output.value,
            blocks=blocks,
            threads=threads,
            routing=str(routing) if routing else None,
            input_scale=input_scale,
            layer=layer,
            trace=str(trace) if trace else None,
            progress=progress,
        )
        options: dict[str, Any] = {"seed": seed} if spec.kind == "sim" else {}
        if watch:
            options["watch"] = _tell_if_stuck
        try:
            results = spawn(run_rank, n_ranks, device=str(spec), args=(job,), **options)
        except RankFailed as error:
            if isinstance(error.error, LaunchError):
                usage(f"rank {error.rank}: {error.error}")
            typer.echo(f"epdsl run: {error}", err=True)
            raise typer.Exit(1) from None
        except (ValueError, DeviceUnavailable) as error:
            usage(str(error))
    problems = [problem for result in results for problem in result.problems]
    if trace:
        _merge_traces([rank_trace_path(trace, r) for r in range(n_ranks)], trace)
    notes = _notes(job, results[0])
    if as_json:
        shown = {k: v for k, v in asdict(job).items() if k != "progress"}
        document = {"ok": not problems, "device": str(spec), "config": shown, "notes": notes, "ranks": [asdict(r) for r in results]}
        typer.echo(json.dumps(document, indent=1))
    else:
        _show_run(job, results, str(spec))
        for problem in problems[:20]:
            typer.echo(problem, err=True)
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        if problems:
            typer.echo(f"{len(problems)} disagreements with the reference", err=True)
        else:
            typer.echo("ok")
    if problems:
        raise typer.Exit(1)


STUCK_SECONDS = 2.0
"""Without anything new on any rank, `--watch` tells."""


def _tell_if_stuck(ranks: Sequence[Any]) -> None:
    from epdsl_runtime.health import stuck

    if stuck(ranks, STUCK_SECONDS):
        typer.echo("\n".join(["nothing goes on:", *map(str, ranks)]), err=True)


def _notes(config: Any, first: Any) -> list[str]:
    """Which of the options given had no effect on this device, and what would change that."""
    from .kernels.dispatch_parameters import PUBLISHER_WARPS
    from .targets import parse_target

    target = parse_target(first.target)
    smallest = PUBLISHER_WARPS * target.warp_size
    notes: list[str] = []
    if config.layer["ep_copy_role_split"] and first.block <= smallest:
        notes.append(
            f"--ep-copy-role-split had no effect: a block has {first.block} threads, "
            f"all of which the {PUBLISHER_WARPS} warps that send take; use --threads {smallest + 64} or more"
        )
    if config.layer["ep_send_join_named"] and not target.has_named_barriers:
        notes.append(f"--ep-send-join-named had no effect: {target.name} has no named barriers and joins on the block's")
    if config.layer["staged"] and not target.has_bulk_copy:
        notes.append(f"--staged had no effect: {target.name} has no copy engine, so rows were copied by the warps' lanes")
    return notes


def _merge_traces(files: list[Path], output: Path) -> list[dict[str, Any]]:
    """Merges ranks' events into one Perfetto document. Returns what is said of each rank's clock. Raises ValueError for a wrong file."""
    from .trace import merge, read_rank

    document = merge([read_rank(file) for file in files])
    output.write_text(json.dumps(document))
    return document["otherData"]["clocks"]


def trace(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="Each rank's events: OUT.rank0.json, OUT.rank1.json, ...")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="The merged file, for ui.perfetto.dev.")] = Path(
        "trace.json"
    ),
    as_json: Json = False,
) -> None:
    """Merge the events that `epdsl run --trace` recorded on every rank into one time line, by rank 0's clock."""
    try:
        clocks = _merge_traces(files, output)
    except ValueError as error:
        usage(str(error))
    if as_json:
        typer.echo(json.dumps({"output": str(output), "clocks": clocks}, indent=1))
        return
    rows = [
        (str(c["rank"]), str(c["events"]), str(c["dropped"]), f"{c['offset_ns']:.0f} ns", f"{c['uncertainty_ns']:.0f} ns") for c in clocks
    ]
    show_table(f"{output}", ("rank", "events", "dropped", "clock minus rank 0's", "known within"), rows)


def _median(values: list[float]) -> float:
    """Of all but the first, which pays for compiling and loading, where there are more."""
    kept = sorted(values[1:] or values)
    return kept[len(kept) // 2]


def _show_run(config: Any, results: list[Any], device: str) -> None:
    """A row a rank: bytes sent to other ranks by one dispatch and combine, median times of a launch, largest error of any combine."""
    first = results[0]
    title = (
        f"{config.ranks} ranks on {device} ({first.device}), {config.tokens} tokens x {config.hidden}, "
        f"top-{config.topk} of {config.experts} experts, {config.launches} launches of {first.grid} blocks x {first.block} threads, "
        f"{'fused' if config.fused else 'split'}, completion per {config.completion}\n"
        "rows: received; sent: to other ranks by one dispatch and combine; times: a launch, median; "
        "error: largest of any combine, and how much of the bound for it that is"
    )
    columns = ("rank", "tokens", "rows", "sent", "dispatch", "experts", "combine", "error", "of bound")
    rows = [
        (
            str(r.rank),
            str(r.tokens),
            str(r.received),
            byte_text(r.dispatch_bytes + r.combine_bytes),
            time_text(_median(r.dispatch_us)),
            time_text(_median(r.expert_us)),
            time_text(_median(r.combine_us)),
            f"{r.largest_error:.1e}",
            f"{r.error_ratio:.0%}",
        )
        for r in results
    ]
    show_table(title, columns, rows)
