"""Which rank of which job this process is, when something else started it: a launcher's environment, torch.distributed or MPI."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .bootstrap import LauncherError
from .env import MOST_PORT, PORT, TOKEN
from .peer_memory import MACHINE
from .rendezvous import Hub, SocketBootstrap


@dataclass(frozen=True)
class Launched:
    """What a launcher says of this process."""

    launcher: str
    index: int
    size: int
    local_index: int
    host: str
    port: int


@dataclass(frozen=True)
class _Launcher:
    """A launcher's variables: a rank's number, the ranks of the job, both on this machine alone, and what marks the job (may be none).

    sure  whether it sets the number on this machine always, so that without it the others are another's
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str = ""
    sure: bool = False

    def started(self, environment: Mapping[str, str]) -> bool:
        return all(environment.get(name) for name in (self.rank, self.size, *([self.local_rank] if self.sure else [])))


# MPICH's come before Slurm's, whose variables its ranks inherit from a batch script; and last, where they lack a local rank.
_MPICH = _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    replace(_MPICH, sure=True),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID"),
    _MPICH,
)
DEFAULT_PORT = 29511
LOCAL = "127.0.0.1"


def rank_in(environment: Mapping[str, str]) -> int | None:
    """The rank that a launcher's variables name; None outside a job."""
    return next((int(text) for row in _LAUNCHERS if row.started(environment) and (text := environment[row.rank]).isdigit()), None)


def launched(environment: Mapping[str, str]) -> Launched:
    """Reads a launcher's environment variables: torchrun's, Open MPI's, Slurm's, or those of MPICH and Intel MPI.

    The rendezvous is at MASTER_ADDR (by default this machine, with Slurm the first node), port EPDSL_PORT, or MASTER_PORT + 1.

    Raises LauncherError naming the variables that are looked for, or the one that is wrong.
    """
    for row in _LAUNCHERS:
        if not row.started(environment):
            continue
        index, size = _number(environment, row.rank), _number(environment, row.size)
        if not 0 <= index < size:
            raise LauncherError("EP316", f"{row.rank}={index} is not a rank of {row.size}={size}; check how {row.name} was started")
        local = _number(environment, row.local_rank) if environment.get(row.local_rank) else index
        return Launched(row.name, index, size, local, _host(environment, row, size), _port(environment))
    wanted = "; ".join(f"{row.name}: {row.rank}, {row.size}" for row in dict.fromkeys(replace(row, sure=False) for row in _LAUNCHERS))
    half = [name for row in _LAUNCHERS for name in (row.rank, row.size) if environment.get(name)]
    found = f"; of these only {', '.join(dict.fromkeys(half))} is set" if half else ""
    raise LauncherError(
        "EP316", f"no launcher's environment was found ({wanted}{found}); start with torchrun, mpirun or srun, or use spawn"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise LauncherError("EP316", f"{name}={environment[name]!r} is no whole number; check how the ranks were started") from None


def _port(environment: Mapping[str, str]) -> int:
    chosen = PORT.get(environment)
    if chosen or not environment.get("MASTER_PORT"):
        return chosen or DEFAULT_PORT
    master = _number(environment, "MASTER_PORT")
    if not 0 < master < MOST_PORT:
        raise LauncherError(
            "EP316", f"MASTER_PORT={master}: the rendezvous takes the port after it, which must be 2 to {MOST_PORT}; set EPDSL_PORT"
        )
    return master + 1


def _host(environment: Mapping[str, str], row: _Launcher, size: int) -> str:
    given = environment.get("MASTER_ADDR", "").strip("[]")
    host = given or (_first_node(environment) if row.name == "Slurm" else LOCAL)
    here = _number(environment, row.local_size) if environment.get(row.local_size) else size
    if not given and host == LOCAL and (here < size or _nodes(environment, row) > 1):
        where = (
            f"{here} of {size} ranks run on this machine" if here < size else f"the {size} ranks run on {_nodes(environment, row)} machines"
        )
        raise LauncherError("EP316", f"{where} and MASTER_ADDR is not set; set it to the machine of rank 0, on every rank")
    return host


def _nodes(environment: Mapping[str, str], row: _Launcher) -> int:
    return _number(environment, "SLURM_NNODES") if row.name == "Slurm" and environment.get("SLURM_NNODES") else 1


def _first_node(environment: Mapping[str, str]) -> str:
    """The first of "node[03-05,9],other7" or "rack[1-2]node[1-4]", which is where rank 0 runs."""
    if environment.get("SLURM_NNODES", "1") == "1":
        return LOCAL
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first and first[0] else LOCAL


def job_token(environment: Mapping[str, str]) -> bytes:
    """What the ranks of one job know and others do not: EPDSL_TOKEN, else made of the job's id and the user."""
    if chosen := TOKEN.get(environment):
        return chosen.encode()
    job = "|".join(environment.get(row.job, "") for row in _LAUNCHERS)
    return hashlib.sha256(f"epdsl|{os.getuid()}|{job}".encode()).digest()


@dataclass(frozen=True)
class Group:
    """Processes that another library has brought together. `allgather` is collective: a picklable value of each, by index."""

    library: str
    index: int
    size: int
    allgather: Callable[[Any], list[Any]]


def _loaded(name: str) -> Any:
    """A module that the program has imported; None without."""
    return sys.modules.get(name)


def group_of(given: Any = None) -> Group | None:
    """A torch.distributed process group or an mpi4py communicator, or what the program has initialised of either. None without.

    Neither library is imported. Raises TypeError for anything else.
    """
    torch: Any = getattr(_loaded("torch"), "distributed", None)
    ready = torch is not None and torch.is_available() and torch.is_initialized()
    mpi = _loaded("mpi4py.MPI")
    if given is None and not ready and mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1:
        given = mpi.COMM_WORLD
    if hasattr(given, "Get_rank") and hasattr(given, "allgather"):
        return _of_communicator(given)
    if given is None and not ready:
        return None
    if not ready or not (given is None or isinstance(given, _process_group(torch))):
        raise TypeError(f"{given!r} is no process group of an initialised torch.distributed and no communicator of mpi4py")
    return _of_process_group(torch, given)


def _process_group(torch: Any) -> Any:
    return torch.ProcessGroup


def _of_communicator(given: Any) -> Group:
    return Group("mpi4py", given.Get_rank(), given.Get_size(), given.allgather)


def _of_process_group(torch: Any, given: Any) -> Group:
    size = torch.get_world_size(given)

    def allgather(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        torch.all_gather_object(found, value, group=given)
        return found

    return Group("torch.distributed", torch.get_rank(given), size, allgather)


def meet(group: Group, timeout: float) -> tuple[SocketBootstrap, int, bytes]:
    """Collective over the group: a connection of our own, this process's number on its machine, and the job's token.

    Raises LauncherError on every rank when rank 0 cannot listen.
    """
    machines: list[str] = group.allgather(MACHINE)
    alone = len(set(machines)) == 1
    hub: Hub | None = None
    offer: Any = None
    if group.index == 0:
        token = secrets.token_bytes(32)
        try:
            hub = Hub(group.size, token, (LOCAL if alone else "", 0))
            offer = (LOCAL if alone else socket.getfqdn(), hub.address[1], token)
        except LauncherError as error:
            offer = error.message
    offer = group.allgather(offer)[0]
    if isinstance(offer, str):
        raise LauncherError("EP316", f"rank 0 of the group of {group.library}: {offer}")
    host, port, token = offer
    bootstrap = SocketBootstrap(group.index, group.size, (host, port), token, hub, timeout)
    return bootstrap, machines[: group.index].count(MACHINE), token
