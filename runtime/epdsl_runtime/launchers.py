"""Which rank of which job this process is, when something else started it: a launcher's environment, torch.distributed or MPI."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


# Launcher, its variables for rank, size and rank on this node, and the one that marks the job.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_NAMESPACE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_ID"),
)
DEFAULT_PORT = 29511
LOCAL = "127.0.0.1"


def rank_in(environment: Mapping[str, str]) -> int | None:
    """The rank that a launcher's variables name; None outside a job."""
    return next((int(environment[rank]) for _, rank, *_ in _LAUNCHERS if environment.get(rank, "").isdigit()), None)


def launched(environment: Mapping[str, str]) -> Launched:
    """Reads a launcher's environment variables: torchrun's, Open MPI's, Slurm's, or those of MPICH and Intel MPI.

    The rendezvous is at MASTER_ADDR (by default this machine, with Slurm the first node), port EPDSL_PORT, or MASTER_PORT + 1.

    Raises RuntimeError naming the variables that are looked for.
    """
    for launcher, rank, size, local, _ in _LAUNCHERS:
        if rank in environment and size in environment:
            host = environment.get("MASTER_ADDR") or (_first_node(environment) if launcher == "Slurm" else LOCAL)
            master = environment.get("MASTER_PORT")
            port = environment.get("EPDSL_PORT") or (str(int(master) + 1) if master else str(DEFAULT_PORT))
            found = Launched(
                launcher, int(environment[rank]), int(environment[size]), int(environment.get(local, environment[rank])), host, int(port)
            )
            if not 0 <= found.index < found.size:
                raise RuntimeError(f"{rank}={found.index} is not a rank of {size}={found.size}; check how {launcher} was started")
            return found
    wanted = "; ".join(f"{launcher}: {rank}, {size}" for launcher, rank, size, _, _ in _LAUNCHERS)
    raise RuntimeError(f"no launcher's environment was found ({wanted}); start with torchrun, mpirun or srun, or use spawn")


def _first_node(environment: Mapping[str, str]) -> str:
    """The first of "node[03-05,9],other7", which is where rank 0 runs."""
    if environment.get("SLURM_NNODES", "1") == "1":
        return LOCAL
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    return LOCAL if found is None else found[1] + (found[2] or "")


def job_token(environment: Mapping[str, str]) -> bytes:
    """What the ranks of one job know and others do not: EPDSL_TOKEN, else made of the job's id and the user."""
    if "EPDSL_TOKEN" in environment:
        return environment["EPDSL_TOKEN"].encode()
    job = "|".join(environment.get(variable, "") for *_, variable in _LAUNCHERS)
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

    Raises RuntimeError on every rank when rank 0 cannot listen.
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
        except OSError as error:
            offer = str(error)
    offer = group.allgather(offer)[0]
    if isinstance(offer, str):
        raise RuntimeError(f"rank 0 of the group of {group.library} could not listen for the others: {offer}")
    host, port, token = offer
    bootstrap = SocketBootstrap(group.index, group.size, (host, port), token, hub, timeout)
    return bootstrap, machines[: group.index].count(MACHINE), token
