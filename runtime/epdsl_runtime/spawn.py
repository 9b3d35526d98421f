"""Starting the ranks of a job: threads on the simulator, processes on GPUs, or ranks that a launcher already started."""

from __future__ import annotations

import atexit
import bdb
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .bootstrap import DEFAULT_TIMEOUT, NO_RANK, RankFailed, SoloBootstrap, ThreadBootstrap, ThreadHub, check_timeout, tell
from .bounded_wait import end_without_waiting
from .devices import FORMS, Factory, Spec, device_count, most_ranks, open_spec, parse_spec
from .errors import traceback_text
from .health import Health, Watcher, timed_out
from .launchers import LOCAL, Launched, group_of, job_token, launched, meet
from .rank import Rank
from .rendezvous import Hub, SocketBootstrap
from .sharing import check_kind

_JOIN_SECONDS = 10.0

Main = Callable[..., Any]
Watch = Callable[[list[Health]], None]


def spawn(
    main: Main,
    ranks: int,
    device: str | Factory = "auto",
    args: Sequence[Any] = (),
    timeout: float | None = None,
    seed: int | None = None,
    peer_memory: str | None = None,
    watch: Watch | None = None,
    survive: bool = False,
) -> list[Any]:
    """Runs `main(rank, *args)` once per rank and returns the results by rank.

    main     on GPUs a function of a module that the ranks' processes can import
    device   "sim": threads of this process; "cuda", "hip": a process and a GPU per rank; "auto": a GPU if one works; "cuda:0": a process
             per rank, all on that GPU, which serves them in turns (right, but slow). A function from a rank's index to a device has a
             process per rank too.
    args     the same for every rank
    timeout  seconds for the whole job; None for no limit of its own
    seed     of the simulator's schedule; EPDSL_SEED, or 0, when left out
    peer_memory  see `Rank`
    watch    called here about once a second with what every rank does (see `health`), until ranks go on without others
    survive  whether the others go on when a rank fails, instead of being ended: each meets a RankFailed or PeerTimeout and may call
             `Rank.shrink`. The result of a rank that failed is its RankFailed; it is raised when all failed

    Raises RankFailed with the first failing rank's traceback or its process's end, JobTimeout saying what the ranks still running do,
    SpawnError when processes cannot be started from here or cannot be given `main`, ValueError when there are more ranks than GPUs,
    bdb.BdbQuit when the debugger was left with `quit` at a kernel's breakpoint().
    """
    ranks, args = _checked(main, ranks, device, args, timeout, seed, peer_memory)
    from .spawn_processes import refuse_while_importing, spawn_processes

    refuse_while_importing()
    if not isinstance(device, str):
        return spawn_processes(main, ranks, device, args, timeout, peer_memory, watch, survive)
    spec = parse_spec(device)
    if spec.kind == "sim":
        return spawn_threads(main, ranks, spec.vendor, args, timeout, seed, watch, survive)
    most = most_ranks(spec)
    if most is not None and ranks > most:
        raise ValueError(
            f"{ranks} ranks need {ranks} GPUs, this process sees {most} of kind {spec.kind}; "
            f"use fewer ranks, let them share one GPU (device='{spec.kind}:0'), or device='sim'"
        )
    return spawn_processes(main, ranks, GpuFactory(spec), args, timeout, peer_memory, watch, survive)


def _checked(
    main: Any, ranks: Any, device: Any, args: Any, timeout: float | None, seed: int | None, peer_memory: str | None
) -> tuple[int, tuple[Any, ...]]:
    """The number of ranks and the arguments. Raises TypeError or ValueError for what no job can be made of."""
    try:
        count = operator.index(ranks)
    except TypeError:
        raise TypeError(f"ranks is a whole number, not {ranks!r}") from None
    if count < 1:
        raise ValueError(f"a job has at least 1 rank, got {count}")
    if not callable(main):
        raise TypeError(f"main is a function that every rank calls as main(rank, *args), not {main!r}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args is a tuple or a list of what main gets after the rank, not {args!r}; write args=({args!r},) for one")
    if not (isinstance(device, str) or callable(device)):
        raise TypeError(f"device is {FORMS}, or a function from a rank's number to a device, not {device!r}")
    check_timeout(timeout)
    if seed is not None and operator.index(seed) < 0:
        raise ValueError(f"seed={seed}: a seed is 0 or more")
    check_kind(peer_memory)
    return count, tuple(args)


@dataclass(frozen=True)
class GpuFactory:
    """Opens rank i's GPU: the one named, or the i-th."""

    spec: Spec

    def __call__(self, index: int) -> Any:
        return open_spec(self.spec_of(index))

    def spec_of(self, index: int) -> Spec:
        return self.spec if self.spec.index is not None else Spec(self.spec.kind, index)


def spawn_threads(
    main: Main,
    ranks: int,
    vendor: str,
    args: Sequence[Any],
    timeout: float | None,
    seed: int | None,
    watch: Watch | None = None,
    survive: bool = False,
) -> list[Any]:
    """The ranks as threads on one simulated machine. See `spawn`."""
    from .sim import SimEngine

    engine = SimEngine(ranks, vendor, seed=seed)
    hub = ThreadHub(ranks)
    results: list[Any] = [None] * ranks
    failures: list[tuple[int, BaseException, str]] = []

    def body(index: int) -> None:
        failure: BaseException | None = None
        bootstrap = ThreadBootstrap(hub, index, engine.block)
        try:
            rank = Rank(index, ranks, engine.device(index), bootstrap)
            results[index] = main(rank, *args)
            rank.close()
        except BaseException as error:
            failure = error
            text = traceback_text(error)
            failures.append((index, error, text))
            results[index] = RankFailed(index, text, error)
            tell(bootstrap, error)
            bootstrap.close()
        finally:
            engine.rank_done(index, failure)

    # Daemons: a rank that never returns must not keep the interpreter from ending.
    threads = [threading.Thread(target=body, args=(index,), name=f"epdsl-rank-{index}", daemon=True) for index in range(ranks)]
    for thread in threads:
        thread.start()
    deadline = None if timeout is None else time.monotonic() + timeout
    told = False
    watcher = Watcher(watch, hub.health)
    try:
        while running := [index for index, thread in enumerate(threads) if thread.is_alive()]:
            if deadline is not None and time.monotonic() > deadline:
                break
            threads[running[0]].join(0.05)
            watcher.look()
            if failures and not told and not survive:
                # The others hear of it at their next wait; what does not come to one is left behind.
                told = True
                deadline = min(deadline or math.inf, time.monotonic() + _JOIN_SECONDS)
    except BaseException as error:
        # Ctrl-C, or a failure of `watch`: the ranks would wait for each other as long as this process lives.
        hub.abort(NO_RANK, f"the job was ended by {type(error).__name__} where it was started")
        raise
    if failures and not (survive and len(failures) < ranks and not running):
        index, error, text = _cause(failures)
        if isinstance(error, bdb.BdbQuit):
            raise error
        raise RankFailed(index, text, error) from error
    if running:
        error = timed_out(timeout, running, hub.health())
        hub.abort(NO_RANK, error.message)
        raise error
    return results


def _cause(failures: list[tuple[int, BaseException, str]]) -> tuple[int, BaseException, str]:
    """The first failure that is not the news of another's."""
    return next((failure for failure in failures if not isinstance(failure[1], RankFailed)), failures[0])


def init(device: str = "auto", timeout: float = DEFAULT_TIMEOUT, peer_memory: str | None = None, group: Any = None) -> Rank:
    """The rank that this process is, started by torchrun, mpirun, mpiexec or Slurm. Call `close` on it at the end, on every rank.

    timeout  seconds any meeting of the ranks may take
    peer_memory  see `Rank`
    group    collective then: a torch.distributed process group or an mpi4py communicator whose processes are the ranks. By default the one
             that the program has initialised; without one the launcher's environment variables say who is who

    Raises LauncherError when no launcher's environment is found, it is wrong, or rank 0 cannot listen; Refused or BootstrapTimeout when
    this process cannot join the others; ValueError when this node has fewer GPUs than ranks.
    """
    check_timeout(timeout)
    check_kind(peer_memory)
    spec = parse_spec(device)
    found = group_of(group)
    job = launched(os.environ) if found is None else None
    if (found or job).size == 1:  # pyright: ignore[reportOptionalMemberAccess]
        return Rank(0, 1, open_spec(spec), SoloBootstrap())
    if found is not None:
        bootstrap, local, token = meet(found, timeout)
        job = Launched(found.library, found.index, found.size, int(os.environ.get("LOCAL_RANK", local)), "", 0)
    else:
        assert job is not None
        token = job_token(os.environ)
        listens = "" if job.host not in (LOCAL, "localhost") else job.host
        hub = Hub(job.size, token, (listens, job.port)) if job.index == 0 else None
        bootstrap = SocketBootstrap(job.index, job.size, (job.host, job.port), token, hub, timeout)
    _tell_of_exceptions(bootstrap)
    # First, so that it runs after the connection has been closed.
    end_without_waiting()
    atexit.register(bootstrap.close)
    try:
        return Rank(job.index, job.size, _opened(spec, job, token), bootstrap, peer_memory)
    except BaseException as error:
        tell(bootstrap, error)
        raise


def _opened(spec: Spec, job: Launched, token: bytes) -> Any:
    if spec.kind == "sim":
        from .sim_process import ProcessDevice

        return ProcessDevice(spec.vendor, job.index, job=token.hex())
    return open_spec(_local_device(spec, job))


def _local_device(spec: Spec, job: Launched) -> Spec:
    if spec.kind == "sim" or spec.index is not None:
        return spec
    count = device_count(spec.kind)
    # A launcher may show each process one GPU of its own.
    if count == 1 and job.size > 1 and job.local_index > 0:
        return Spec(spec.kind, 0)
    if job.local_index >= count:
        raise ValueError(
            f"rank {job.index} is number {job.local_index} on its node and needs that GPU, this process sees {count} of kind {spec.kind}; "
            f"start fewer ranks on a node, or let them share one (device='{spec.kind}:0')"
        )
    return Spec(spec.kind, job.local_index)


def _tell_of_exceptions(bootstrap: Any) -> None:
    """Has an exception that ends this process reach the other ranks with its traceback."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        tell(bootstrap, error)
        previous(kind, error, trace)

    sys.excepthook = hook
