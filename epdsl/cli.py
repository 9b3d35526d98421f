"""The `epdsl` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .cli_bench import bench
from .cli_check import check
from .cli_tools import Failure, byte_text, load_kernel, progress_of, show_table, time_text

SIMULATED_RANKS = 8

app = typer.Typer(
    name="epdsl",
    help="Expert-parallel communication kernels in Python, for NVIDIA, AMD and a simulator.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


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


class Family(StrEnum):
    """Kernel families that `build` knows by name."""

    dispatch = "dispatch"
    combine = "combine"


def usage(message: str) -> NoReturn:
    """Ends the command with exit status 2."""
    typer.echo(f"epdsl: {message}", err=True)
    raise typer.Exit(2)


@app.command()
def run(
    device: Annotated[str, typer.Option(help="auto, sim, sim:nvidia, sim:amd, cuda, hip.")] = "auto",
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks; by default the GPUs present, or 8 on the simulator.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of each rank.")] = 16,
    hidden: Annotated[int, typer.Option(min=8, help="Elements of a token, a multiple of 8.")] = 512,
    experts: Annotated[int, typer.Option(min=1, help="Experts of the whole layer, a multiple of the ranks.")] = 64,
    topk: Annotated[int, typer.Option("--topk", min=1, help="Experts of a token.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of routing, tokens and the simulator's schedule.")] = 0,
    launches: Annotated[int, typer.Option(min=1, help="How often to dispatch and combine; each is verified.")] = 3,
    routing: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help=".npz with topk_idx and topk_weights of a real router.")
    ] = None,
    completion: Annotated[
        Completion, typer.Option(help="Completion per rank, per expert with an elected release, or a release for every expert.")
    ] = Completion.rank,
    ordering: Annotated[Order, typer.Option(help="Of completion per expert; seed is the original's racy one.")] = Order.acq_rel,
    token_format: Annotated[Format, typer.Option(help="How tokens travel; all but bf16 quantise.")] = Format.bf16,
    fused_shared_expert: Annotated[
        bool, typer.Option("--fused-shared-expert", help="A shared expert's rows beside the routed ones.")
    ] = False,
    skip_a2a: Annotated[bool, typer.Option("--skip-a2a", help="Every rank has all tokens and keeps to its own experts.")] = False,
    ep_final_layout: Annotated[bool, typer.Option("--ep-final-layout", help="Sources write rows to their final place.")] = False,
    ep_prod_reserve: Annotated[bool, typer.Option("--ep-prod-reserve", help="Places by one reservation a block.")] = False,
    ep_copy_role_split: Annotated[bool, typer.Option("--ep-copy-role-split", help="Four warps send, the others pack.")] = False,
    ep_send_join_named: Annotated[bool, typer.Option("--ep-send-join-named", help="Pack and send join on named barrier 3.")] = False,
    sm_schedule: Annotated[SmSchedule, typer.Option(help="Which blocks copy which expert.")] = SmSchedule.auto,
    combine_schedule: Annotated[CombineSchedule, typer.Option(help="How the combine's sending is divided.")] = CombineSchedule.auto,
    unreduced: Annotated[bool, typer.Option("--unreduced", help="Combine without summing.")] = False,
    trace: Annotated[Path | None, typer.Option(dir_okay=False, help="Write every rank's phases there, for ui.perfetto.dev.")] = None,
    fused: Annotated[bool, typer.Option("--fused/--split", help="One launch for dispatch and one for combine, or two each.")] = True,
    output: Annotated[OutputType, typer.Option(help="Element type of the combined tokens.")] = OutputType.bf16,
    blocks: Annotated[int | None, typer.Option(min=2, help="Blocks of a launch.")] = None,
    threads: Annotated[int | None, typer.Option(min=64, help="Threads of a block, a multiple of 64.")] = None,
    as_json: Json = False,
) -> None:
    """Run an expert-parallel layer (dispatch, expert, combine) on every rank and verify it against NumPy.

    Exit status 1 when it disagrees, 2 for a configuration that cannot work.
    """
    from epdsl_runtime.bootstrap import RankFailed
    from epdsl_runtime.devices import device_count, parse_spec
    from epdsl_runtime.driver_device import DeviceUnavailable
    from epdsl_runtime.spawn import spawn

    from .demo import RunConfig, load_routing, rank_trace_path, run_rank
    from .moe import MoEConfig

    layer: dict[str, Any] = {
        "ordering": ordering.value,
        "token_format": token_format.value,
        "fused_shared_expert": fused_shared_expert,
        "skip_a2a": skip_a2a,
        "ep_final_layout": ep_final_layout,
        "ep_prod_reserve": ep_prod_reserve,
        "ep_copy_role_split": ep_copy_role_split,
        "ep_send_join_named": ep_send_join_named,
        "sm_schedule": sm_schedule.value,
        "combine_schedule": combine_schedule.value,
        "unreduced": unreduced,
    }
    try:
        spec = parse_spec(device)
        n_ranks = ranks or (SIMULATED_RANKS if spec.kind == "sim" else max(1, device_count(spec.kind)))
        loaded = load_routing(routing, n_ranks) if routing else None
        if loaded:
            topk = loaded[0].topk_idx.shape[1]
            tokens = max(r.n_tokens for r in loaded)
        # Refused here, before any rank is started.
        MoEConfig(
            hidden=hidden,
            n_experts=experts,
            top_k=topk,
            max_tokens_per_rank=max(tokens, 1),
            n_ranks=n_ranks,
            num_threads=threads or 256,
            n_sms=blocks or 8,
            completion=completion.value,
            **layer,
        )
    except (ValueError, NotImplementedError, DeviceUnavailable) as error:
        usage(str(error))
    with progress_of(f"{n_ranks} ranks on {spec}", launches) as progress:
        config = RunConfig(
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
            layer=layer,
            trace=str(trace) if trace else None,
            progress=progress,
        )
        options = {"seed": seed} if spec.kind == "sim" else {}
        try:
            results = spawn(run_rank, n_ranks, device=str(spec), args=(config,), **options)
        except RankFailed as error:
            typer.echo(f"epdsl run: {error}", err=True)
            raise typer.Exit(1) from None
        except ValueError as error:
            usage(str(error))
    problems = [problem for result in results for problem in result.problems]
    if trace:
        _merge_traces([rank_trace_path(trace, r) for r in range(n_ranks)], trace)
    if as_json:
        shown = {k: v for k, v in asdict(config).items() if k != "progress"}
        typer.echo(json.dumps({"ok": not problems, "device": str(spec), "config": shown, "ranks": [asdict(r) for r in results]}, indent=1))
    else:
        _show_run(config, results, str(spec))
        for problem in problems[:20]:
            typer.echo(problem, err=True)
        if problems:
            typer.echo(f"{len(problems)} disagreements with the reference", err=True)
        else:
            typer.echo("ok")
    if problems:
        raise typer.Exit(1)


def _merge_traces(files: list[Path], output: Path) -> list[dict[str, Any]]:
    """Merges ranks' events into one Perfetto document. Returns what is said of each rank's clock. Raises ValueError for a wrong file."""
    from .trace import merge, read_rank

    document = merge([read_rank(file) for file in files])
    output.write_text(json.dumps(document))
    return document["otherData"]["clocks"]


@app.command()
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


@app.command()
def build(
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
    completion: Annotated[Completion, typer.Option(help="For --family.")] = Completion.rank,
    as_json: Json = False,
) -> None:
    """Compile kernels to artifacts that `epdsl_runtime` loads without a compiler."""
    from .moe import MoEConfig

    if (kernel is None) == (not family):
        usage("build needs either FILE.py:NAME or --family")
    targets = [name for given in target for name in given.split(",") if name]
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
            )
            if Family.dispatch in family:
                made = config.dispatch_kernel
                kernels |= {"dispatch_async": made.dispatch_async, "dispatch_wait": made.dispatch_wait, "dispatch": made.dispatch}
            if Family.combine in family:
                made = config.combine_kernel
                kernels |= {"combine_async": made.combine_async, "combine_wait": made.combine_wait, "combine": made.combine}
    except (Failure, ValueError, NotImplementedError) as error:
        usage(str(error))
    written: list[dict[str, Any]] = []
    with progress_of("compiling", len(targets) * len(kernels)) as progress:
        for each in targets:
            for name, item in kernels.items():
                try:
                    artifact = item.compile(each)
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


@app.command()
def dump(
    kernel: Annotated[str, typer.Argument(help="FILE.py:KERNEL")],
    target: Annotated[str, typer.Option(help="sm_90, gfx942, sim:nvidia, ...")] = "sim:nvidia",
    stage: Annotated[str, typer.Option(help="ep, llvm, ptx, gcn, ...")] = "ep",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it there instead of printing it.")] = None,
    as_json: Json = False,
) -> None:
    """Show what the compiler made of a kernel at one stage."""
    try:
        artifact = load_kernel(kernel).compile(target)
        text = artifact.text(stage)
    except KeyError as error:
        usage(str(error.args[0]))
    except (Failure, ValueError) as error:
        usage(str(error))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    if as_json:
        typer.echo(json.dumps({"kernel": artifact.name, "target": artifact.target, "stage": stage, "text": text}))
    elif output is None:
        typer.echo(text)


@app.command()
def devices(as_json: Json = False) -> None:
    """List the devices of this machine, and why a kind has none."""
    from epdsl_runtime.devices import list_devices

    found = list_devices()
    if as_json:
        typer.echo(
            json.dumps([{"device": d.spec, "info": asdict(d.info) if d.info else None, "reason": d.reason} for d in found], indent=1)
        )
        return
    rows = [
        (d.spec, d.info.name, d.info.target, str(d.info.num_sms), str(d.info.warp_size), f"{d.info.total_memory / 2**30:.1f} GiB")
        if d.info
        else (d.spec, "not available", d.reason or "", "", "", "")
        for d in found
    ]
    show_table("", ("device", "name", "target", "SMs", "warp", "memory"), rows)


@app.command()
def kernels(as_json: Json = False) -> None:
    """List the kernel family: its kernels, parameters and what they mean."""
    from dataclasses import MISSING, fields

    from .kernels import (
        BF16TokenFormat,
        BlockwiseFP8TokenFormat,
        EPCombineKernel,
        EPDispatchKernel,
        MXFP4TokenFormat,
        MXFP8TokenFormat,
        NVFP4TokenFormat,
        RingTrace,
    )
    from .kernels.fused_example import EPDispatchConsume
    from .kernels.multi_gpu import MultiGpuAllReduce

    families: dict[Any, tuple[str, ...]] = {
        EPDispatchKernel: ("dispatch_async", "dispatch_wait", "dispatch"),
        EPCombineKernel: ("combine_async", "combine_wait", "combine"),
        EPDispatchConsume: ("dispatch_and_consume",),
        MultiGpuAllReduce: ("all_reduce",),
        BF16TokenFormat: (),
        BlockwiseFP8TokenFormat: (),
        MXFP8TokenFormat: (),
        MXFP4TokenFormat: (),
        NVFP4TokenFormat: (),
        RingTrace: (),
    }
    described = [
        {
            "name": family.__name__,
            "kernels": list(names),
            "parameters": [
                {
                    "name": f.name,
                    "type": str(f.type),
                    "default": None if f.default is MISSING else f.default if isinstance(f.default, (bool, int, str)) else repr(f.default),
                    "required": f.default is MISSING,
                }
                for f in fields(family)
            ],
            "summary": (family.__doc__ or "").strip().splitlines()[0],
        }
        for family, names in families.items()
    ]
    if as_json:
        typer.echo(json.dumps(described, indent=1))
        return
    for family in described:
        rows = [(p["name"], p["type"], "required" if p["required"] else repr(p["default"])) for p in family["parameters"]]
        what = f": {', '.join(family['kernels'])}" if family["kernels"] else ""
        show_table(f"{family['name']}{what}\n{family['summary']}", ("parameter", "type", "default"), rows)


@app.command()
def env(as_json: Json = False) -> None:
    """Print the environment variables epdsl reads, and the values in force."""
    from . import env as table

    rows = table.describe()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show_table("", ("variable", "value", "default", "meaning"), [(r.name, str(r.value), str(r.default), r.meaning) for r in rows])


app.command()(check)
app.command()(bench)


def main() -> None:
    """Entry point of the `epdsl` command."""
    try:
        app()
    except Failure as error:
        typer.echo(f"epdsl: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
