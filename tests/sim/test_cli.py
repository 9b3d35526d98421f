"""The `epdsl` command: what it prints, what it exits with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from epdsl_runtime.artifact import Artifact
from epdsl_runtime.devices import Listed
from epdsl_runtime.protocol import DeviceInfo
from typer.testing import CliRunner, Result

from epdsl import demo, reference
from epdsl.cli import app, main
from epdsl.cli_tools import byte_text, time_text
from epdsl.codegen import CodegenError, find_tool

SMALL = ["--device", "sim", "--ranks", "2", "--tokens", "4", "--hidden", "32", "--experts", "8", "--topk", "2", "--launches", "2"]
SHAPE = SMALL[2:]
PUT_SIGNAL = str(Path(__file__).parents[2] / "examples" / "put_signal.py") + ":put_signal"


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_run_ends_in_ok_and_prints_no_progress_on_a_pipe() -> None:
    result = invoke("run", *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "ok"
    assert "\x1b" not in result.output and result.stderr == ""
    assert "of bound" in result.stdout and "largest of any combine" in result.stdout


def test_run_json_says_what_every_rank_did() -> None:
    result = invoke("run", *SMALL, "--json", "--completion", "expert", "--split", "--seed", "5")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["ok"] is True and found["device"] == "sim:nvidia"
    assert found["config"]["completion"] == "expert" and found["config"]["fused"] is False
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    for each in found["ranks"]:
        assert each["problems"] == [] and len(each["dispatch_us"]) == 2 and each["error_ratio"] <= 1
    # Every selection is a row somewhere; a message is 64 bytes of token, 16 of source, 16 of ids.
    assert sum(r["received"] for r in found["ranks"]) == 2 * 4 * 2
    assert sum(r["dispatch_bytes"] for r in found["ranks"]) * 64 == sum(r["combine_bytes"] for r in found["ranks"]) * 96


def test_run_exits_1_when_the_result_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "expert_scale", lambda expert: np.asarray(2 + np.asarray(expert) % 8, np.float32))
    result = invoke("run", *SMALL)
    assert result.exit_code == 1
    assert "away from the exact sum" in result.stderr and "disagreements with the reference" in result.stderr
    assert "ok" not in result.stdout.split()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["run", "--device", "sim", "--ranks", "3"], "64 experts cannot be divided over 3 ranks"),
        (["run", "--device", "sim", "--hidden", "20"], "hidden=20 is 40 bytes a token"),
        (["run", "--device", "abacus"], "'abacus' names no device"),
        (["run", "--topk", "x"], "--topk"),
        (["run", "--device", "sim", "--token-format", "fp8", "--hidden", "64"], "64 elements are not whole groups of 128"),
        (["run", "--device", "sim", "--threads", "2048"], "num_threads=2048, but no GPU's block has more than 1024"),
        (["run", "--device", "sim", "--blocks", "4000", *SHAPE], "a grid of 4000 blocks whose blocks wait for each other"),
        (["run", "--device", "sim", "--ordering", "seed"], "ordering='seed' with completion='rank'"),
        (["run", "--device", "sim", "--ordering", "seed", "--completion", "every"], "use completion='expert', or leave ordering"),
        (["run", "--device", "sim", "--ep-prod-reserve"], "set ep_final_layout too, or neither"),
        (["run", "--device", "sim", "--unreduced", "--fused-shared-expert"], "which unreduced=True does not make; set one of them"),
        (["run", "--device", "sim", "--fold-scales"], "fold_scales=True with token_format='bf16'"),
        (["run", "--device", "sim", "--tile-claims", "3"], "tile_claims=3 does not divide the 64 units of 8 elements"),
        (["run", "--device", "sim", "--input-scale", "2"], "BF16TokenFormat has none, leave it out"),
        (["run", "--device", "sim", "--input-scale", "0", "--token-format", "nvfp4"], "input_scale is 0.0; it must be a finite number"),
        (["run", "--device", "sim", "--trace", "/no/such/folder/x.json"], "/no/such/folder is no directory"),
        (["run", "--device", "sim", "--routing", __file__], "is no .npz of plain arrays"),
        (["build", PUT_SIGNAL, "--target", "sm_90", "--token-format", "nvfp4"], "--token-format is for --family"),
        (["build", "--family", "dispatch", "--target", "sm_90", "--ep-prod-reserve"], "set ep_final_layout too, or neither"),
        (["build", "--target", "sm_90"], "FILE.py:NAME or --family"),
        (["build", "--family", "dispatch"], "needs --target"),
        (["build", PUT_SIGNAL, "--target", "sm_1"], "unknown target 'sm_1'"),
        (["dump", "nothing.py:k"], "nothing.py is no file"),
        (["dump", PUT_SIGNAL + "s"], "its kernels are put_signal"),
        (["dump", PUT_SIGNAL.rpartition(":")[0]], ":NAME, its kernels are put_signal\n"),
        (["dump", "nothing"], "'nothing' names no kernel; write FILE.py:NAME\n"),
        (["dump", PUT_SIGNAL, "--stage", "sass"], "has no 'sass' text; it has ep, llvm"),
        (["bunch"], "bunch"),
    ],
    ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "",
)
def test_usage_errors_exit_2_and_say_why(args: list[str], text: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert text in result.stderr


def routing_file(path: Path, **arrays: Any) -> str:
    np.savez(path / "routing.npz", **arrays)
    return str(path / "routing.npz")


def test_a_real_routers_decisions_can_be_replayed(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    ids = np.stack([rng.permutation(8)[:3] for _ in range(7)])
    weights = rng.random((7, 3))
    file = routing_file(tmp_path, topk_idx=ids, topk_weights=weights)
    shape = ["--device", "sim", "--ranks", "2", "--hidden", "32", "--experts", "8", "--launches", "1"]
    found = json.loads(invoke("run", *shape, "--routing", file, "--json").stdout)
    assert found["ok"] and [r["tokens"] for r in found["ranks"]] == [4, 3] and found["config"]["topk"] == 3


@pytest.mark.parametrize(
    ("ids", "options", "text"),
    [
        ([[0, 1], [2, 9]], [], "rank 1's topk_idx[0, 1] is 9, but the layer has 8 experts; use --experts 10 or more"),
        ([[0, 1], [2, -2]], [], "rank 1's topk_idx[0, 1] is -2, but the layer has 8 experts"),
        ([[3, 3], [0, 1]], [], "rank 0's topk_idx[0] is [3, 3]; each expert may be named once in a row"),
        ([[0, 1], [2, 3]], ["--topk", "4"], "--topk 4, but {file} has 2; leave --topk out"),
        ([[0, 1], [2, 3]], ["--tokens", "7"], "--tokens 7, but {file} has 1; leave --tokens out"),
    ],
)
def test_a_routing_that_cannot_be_replayed_is_refused(tmp_path: Path, ids: list[list[int]], options: list[str], text: str) -> None:
    file = routing_file(tmp_path, topk_idx=np.array(ids), topk_weights=np.ones((2, 2)))
    result = invoke("run", "--device", "sim", "--ranks", "2", "--experts", "8", "--routing", file, *options)
    assert result.exit_code == 2 and text.format(file=file) in result.stderr, result.output


def test_routing_files_of_every_form(tmp_path: Path) -> None:
    ids, weights = np.zeros((4, 2), np.int64), np.ones((4, 2))
    split = demo.load_routing(routing_file(tmp_path, topk_idx=ids, topk_weights=weights), 2)
    stacked = demo.load_routing(routing_file(tmp_path, topk_idx=ids.reshape(2, 2, 2), topk_weights=weights.reshape(2, 2, 2)), 2)
    named = {f"{n}_{r}": a for n, a in (("topk_idx", ids[:2]), ("topk_weights", weights[:2])) for r in range(2)}
    by_rank = demo.load_routing(routing_file(tmp_path, **named), 2)
    for form in (split, stacked, by_rank):
        assert [r.topk_idx.tolist() for r in form] == [[[0, 0]] * 2] * 2
        assert form[0].topk_idx.dtype == np.int32 and form[0].topk_weights.dtype == np.float32
    with pytest.raises(ValueError, match="needs arrays topk_idx and topk_weights; it has indices"):
        demo.load_routing(routing_file(tmp_path, indices=ids), 2)
    with pytest.raises(ValueError, match="so 2 ranks, but there are 4"):
        demo.load_routing(routing_file(tmp_path, topk_idx=ids.reshape(2, 2, 2), topk_weights=weights.reshape(2, 2, 2)), 4)
    with pytest.raises(ValueError, match="the ids integers"):
        demo.load_routing(routing_file(tmp_path, topk_idx=weights, topk_weights=weights), 2)


def test_build_writes_artifacts_that_load(tmp_path: Path) -> None:
    try:
        find_tool("ld.lld", "ld.lld")
    except CodegenError as error:
        pytest.skip(f"no linker for AMD here: {error}")
    options = ["--hidden", "128", "--experts", "8", "--topk", "2", "--ranks", "2", "--threads", "128", "--blocks", "4"]
    families = ["--family", "dispatch", "--family", "combine"]
    result = invoke("build", *families, "--target", "sm_90,gfx942", "--target", "gfx950", "-o", str(tmp_path), *options, "--json")
    written = json.loads(result.stdout)
    kernels = ["dispatch_async", "dispatch_wait", "dispatch", "combine_async", "combine_wait", "combine"]
    assert [(w["target"], w["kernel"]) for w in written] == [(t, k) for t in ("sm_90", "gfx942", "gfx950") for k in kernels]
    for each in written:
        artifact = Artifact.load(each["path"])
        assert artifact.target == each["target"] and len(artifact.binary) == each["bytes"] and artifact.max_threads == 128
        start = b"//\n// Generated by LLVM" if artifact.vendor == "nvidia" else b"\x7fELF"
        assert artifact.binary.startswith(start)


def test_reasons_stand_below_the_table_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    info = DeviceInfo("cuda", 0, "a GPU", "sm_90", "nvidia", 32, 132, 1024, 1, 1 << 30)
    found = [
        Listed("cuda:0", info, None, (("fabric", "the driver says no"), ("fd", None), ("ipc", None))),
        Listed("hip", None, "EP220: no HIP device"),
    ]
    monkeypatch.setattr("epdsl_runtime.devices.list_devices", lambda: found)
    assert [line.rstrip() for line in invoke("devices").stdout.splitlines() if line.strip(" ─")] == [
        " device  name           target  SMs  warp  memory   peer memory",
        " cuda:0  a GPU          sm_90   132  32    1.0 GiB  fd, ipc",
        " hip     not available",
        "cuda:0: no peer memory of kind fabric: the driver says no",
        "hip: EP220: no HIP device",
    ]


def test_lists() -> None:
    devices = {d["device"]: d for d in json.loads(invoke("devices", "--json").stdout)}
    assert devices["sim:amd"]["info"]["warp_size"] == 64 and devices["sim:nvidia"]["info"]["warp_size"] == 32
    assert devices["sim:amd"]["peer_memory"] == {"process": None} and "peer memory" in invoke("devices").stdout
    families = {f["name"]: f for f in json.loads(invoke("kernels", "--json").stdout)}
    assert families["EPDispatchKernel"]["kernels"] == ["dispatch_async", "dispatch_wait", "dispatch"]
    assert "ep_ord_r" in [p["name"] for p in families["EPDispatchKernel"]["parameters"]]
    variables = {v["name"]: v for v in json.loads(invoke("env", "--json").stdout)}
    assert variables["EPDSL_DEVICE"]["default"] == "auto"


def test_the_examples_run() -> None:
    import runpy

    folder = Path(__file__).parents[2] / "examples"
    put_signal = runpy.run_path(str(folder / "put_signal.py"))
    layer = runpy.run_path(str(folder / "moe_layer.py"))
    from epdsl_runtime.spawn import spawn

    assert spawn(put_signal["main"], 3, device="sim") == [20000.0, 0.0, 10000.0]
    assert max(spawn(layer["main"], 2, device="sim:amd")) < 2**-7


def test_numbers_are_short() -> None:
    assert [time_text(us) for us in (0, 7.256, 999.6, 1234.5, 2.5e6)] == ["0 us", "7.26 us", "1 ms", "1.23 ms", "2.5 s"]
    assert [byte_text(n) for n in (0, 999, 1000, 52836, 235_000_000, 15 * 10**9)] == ["0 B", "999 B", "1 kB", "52.8 kB", "235 MB", "15 GB"]


SEEDS = ["--ep-final-layout", "--ep-prod-reserve", "--ep-copy-role-split", "--ep-send-join-named", "--fused-shared-expert"]


def test_run_takes_the_seeds_flags_and_traces_every_phase_of_every_rank(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    small = [*SMALL[:4], "--tokens", "4", "--hidden", "64", "--experts", "4", "--topk", "2", "--launches", "2"]
    result = invoke("run", *small, "--token-format", "nvfp4", *SEEDS, "--completion", "every", "--trace", str(out), "--json")
    assert result.exit_code == 0, result.output
    config = json.loads(result.stdout)["config"]["layer"]
    assert config["token_format"] == "nvfp4" and config["ep_prod_reserve"] and config["fused_shared_expert"] and not config["skip_a2a"]
    document = json.loads(out.read_text())
    phases = {(e["pid"], e["name"]) for e in document["traceEvents"] if e["ph"] == "X"}
    names = {
        "dispatch: copy and send tokens",
        "dispatch: monitor and signal completion",
        "dispatch: wait for arrivals, compute offsets",
        "dispatch: copy received tokens",
        "dispatch: pack shared expert inputs",
        "combine: send tokens back",
        "combine: wait for all arrivals",
        "combine: reduce",
    }
    assert phases == {(rank, name) for rank in range(2) for name in names}
    assert all(e["dur"] >= 0 for e in document["traceEvents"] if e["ph"] == "X")
    clocks = document["otherData"]["clocks"]
    assert [c["rank"] for c in clocks] == [0, 1] and all(c["dropped"] == 0 and c["uncertainty_ns"] >= 0 for c in clocks)
    merged = tmp_path / "merged.json"
    again = invoke("trace", *(str(tmp_path / f"out.rank{r}.json") for r in range(2)), "-o", str(merged), "--json")
    assert again.exit_code == 0 and json.loads(again.stdout)["clocks"] == clocks
    assert merged.read_text() == out.read_text()


def test_a_file_without_events_is_a_usage_error(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    result = invoke("trace", str(wrong))
    assert result.exit_code == 2 and "holds no rank's events" in result.stderr


def test_run_with_skip_a2a_and_the_seeds_racy_ordering() -> None:
    result = invoke(
        "run", *SMALL, "--skip-a2a", "--completion", "expert", "--ordering", "seed", "--combine-schedule", "balanced", "--unreduced"
    )
    assert result.exit_code == 0 and result.stdout.splitlines()[-1] == "ok", result.output


def test_run_with_skewed_schedules_parts_and_staging() -> None:
    """Warp roles that a block is too small for are said to have had no effect."""
    options = ["--sm-schedule", "proportional", "--combine-schedule", "balanced", "--token-format", "nvfp4", "--input-scale", "0.37"]
    copies = ["--fold-scales", "--tile-claims", "2", "--staged", "--ep-copy-role-split", "--threads", "128"]
    small = [*SMALL[:4], "--tokens", "9", "--hidden", "64", "--experts", "4", "--topk", "2", "--launches", "1"]
    result = invoke("run", *small, *options, *copies)
    assert result.exit_code == 0 and result.stdout.splitlines()[-1] == "ok", result.output
    assert result.stderr.splitlines() == [
        "note: --ep-copy-role-split had no effect: a block has 128 threads, all of which the 4 warps that send take; "
        "use --threads 192 or more"
    ]


def test_build_takes_the_flags_of_run(tmp_path: Path) -> None:
    shape = ["--hidden", "64", "--experts", "4", "--topk", "2", "--ranks", "2", "--threads", "192", "--blocks", "4"]
    flags = [*SEEDS, "--token-format", "nvfp4", "--completion", "every", "--sm-schedule", "proportional", "--combine-schedule", "balanced"]
    result = invoke("build", "--family", "dispatch", "--target", "sm_90", "-o", str(tmp_path), *shape, *flags, "--json")
    assert result.exit_code == 0, result.output
    texts = [Path(each["path"]) for each in json.loads(result.stdout)]
    assert [path.name for path in texts] == ["dispatch_async", "dispatch_wait", "dispatch"]
    ptx = [Artifact.load(path).binary.decode() for path in texts]
    # Named barrier 3 joins the 192 threads where tokens are packed, and nowhere else.
    assert [any(line.split()[-2:] == ["3,", "192;"] for line in text.splitlines() if line.strip()) for text in ptx] == [True, False, True]


def test_kernels_lists_the_whole_family() -> None:
    listed = json.loads(invoke("kernels", "--json").stdout)
    names = {each["name"]: [p["name"] for p in each["parameters"]] for each in listed}
    assert {"NVFP4TokenFormat", "MXFP4TokenFormat", "MXFP8TokenFormat", "BlockwiseFP8TokenFormat", "EPDispatchConsume"} <= set(names)
    seeds = ["num_threads", "n_sms", "n_experts", "n_ranks", "max_tokens_per_rank", "p2p_world_size", "token_fmt_type", "use_shmem",
             "fused_shared_expert", "skip_a2a", "has_rank_flag", "ep_ord_r", "ep_final_layout", "ep_prod_reserve", "ep_copy_role_split",
             "ep_send_join_named"]  # fmt: skip
    assert names["EPDispatchKernel"][: len(seeds)] == seeds
    kernels = {each["name"]: each["kernels"] for each in listed}
    assert all(kernels[f"{mode}Exchange"] == ["dispatch", "combine"] for mode in ("LowLatency", "Throughput", "ExpertMajor"))
    assert [p for each in listed if each["name"] == "RingTrace" for p in each["parameters"]] == [
        {"name": "capacity", "type": "int", "default": 256, "required": False},
        {"name": "rings_per_block", "type": "int", "default": 1, "required": False},
    ]


def test_kernels_leaves_out_no_dataclass_with_kernels() -> None:
    import importlib
    import pkgutil

    import epdsl.kernels
    from epdsl.kernel_object import Kernel

    listed = {(each["module"], each["name"]) for each in json.loads(invoke("kernels", "--json").stdout)}
    modules = [importlib.import_module(f"epdsl.kernels.{info.name}") for info in pkgutil.iter_modules(epdsl.kernels.__path__)]
    classes = [c for m in modules for c in vars(m).values() if isinstance(c, type) and any(isinstance(v, Kernel) for v in vars(c).values())]
    assert len(classes) >= 8
    assert {(c.__module__, c.__name__) for c in classes} <= listed


def test_watch_tells_when_nothing_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    from epdsl_runtime.health import Activity, Health

    from epdsl.cli_run import _tell_if_stuck

    lines = ("rank 0 dispatch: 1 thread waiting for memory at f.py:7", "  address 0x1000 holds 0")
    waiting = Activity("a wait for its device", 2.5, (("dispatch", 3),), lines)
    busy, gone = Activity("its own work", 0.1), Health(2, "failed", why="its process ended")
    _tell_if_stuck([Health(0, "running", waiting), Health(1, "running", busy), gone])
    assert capsys.readouterr().err == ""
    _tell_if_stuck([Health(0, "running", waiting, heard=4.0), Health(1, "absent"), gone])
    assert capsys.readouterr().err.splitlines() == [
        "nothing goes on:",
        "rank 0: in a wait for its device for 6.5 s; launched dispatch 3 times",
        "  nothing was heard of it for 4.0 s",
        "  rank 0 dispatch: 1 thread waiting for memory at f.py:7",
        "    address 0x1000 holds 0",
        "rank 1: absent",
        "rank 2: failed (its process ended)",
    ]
    shown = invoke("run", "--device", "sim", "--ranks", "2", "--tokens", "4", "--hidden", "64", "--experts", "4", "--topk", "2", "--watch")
    assert shown.exit_code == 0


@pytest.mark.parametrize("command", [["check", "{}"], ["dump", "{}:kernel"], ["report", "{}:kernel"]], ids=lambda v: v[0])
def test_what_a_file_raises_is_shown_from_its_own_line_on(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bare.py"
    path.write_text("import epdsl as ep\n\n\n@ep.scenario\ndef main(rank):\n    pass\n")
    monkeypatch.setattr("sys.argv", ["epdsl", *(part.format(path) for part in command)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "^" not in line]
    assert lines[:4] == [
        f"epdsl: {path} cannot be imported:",
        "Traceback (most recent call last):",
        f'  File "{path}", line 4, in <module>',
        "    @ep.scenario",
    ]
    assert lines[-1] == "TypeError: a scenario says how many ranks it is for; write @ep.scenario(ranks=2)"
