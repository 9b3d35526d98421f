"""Ranks that something else started: launchers' variables, process groups of torch.distributed, communicators of mpi4py."""

import sys
import threading
import types

import pytest
from epdsl_runtime import VERSION, Disagreement, rank
from epdsl_runtime.bootstrap import LauncherError, ThreadBootstrap, ThreadHub
from epdsl_runtime.launchers import Group, group_of, job_token, launched, meet, rank_in
from epdsl_runtime.rank import Rank
from epdsl_runtime.spawn import init
from runtime_fakes import FakeDevice

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, "127.0.0.1"),
        ({"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[03-05,9],other7"}, "gpu03"),
        ({"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[9,11]"}, "gpu9"),
        ({"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a7", "SLURM_STEP_NODELIST": "b1,b2"}, "b1"),
        ({"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "rack[1-2,7]node[04-07,09],other"}, "rack1node04"),
        ({"SLURM_NNODES": "2", "MASTER_ADDR": "head", "SLURM_JOB_NODELIST": "b1,b2"}, "head"),
        ({"MASTER_ADDR": "[fe80::7]"}, "fe80::7"),
    ],
)
def test_where_slurms_ranks_meet(variables, host):
    assert launched({**SLURM, **variables}).host == host


def test_the_variables_of_mpich():
    found = launched({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"})
    assert (found.launcher, found.index, found.size, found.local_index) == ("mpiexec", 1, 2, 0)


MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}


def test_mpich_in_a_batch_script_of_slurm():
    """Its ranks inherit the script's own place in the allocation, which is one and the same for all of them."""
    found = launched({**MPICH, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"})
    assert (found.launcher, found.index, found.size) == ("mpiexec", 1, 2)
    assert rank_in({**MPICH, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == 1
    by_srun = {"PMI_RANK": "3", "PMI_SIZE": "4", **SLURM}
    assert (launched(by_srun).launcher, launched(by_srun).local_index) == ("Slurm", 1)


def test_ranks_of_one_job_of_mpich_have_one_token():
    assert job_token({**MPICH, "PMI_ID": "0"}) == job_token({**MPICH, "PMI_RANK": "0", "PMI_ID": "1"})


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "no launcher's environment was found (torchrun: RANK, WORLD_SIZE; "),
        ({"RANK": "0"}, "SLURM_PROCID, SLURM_NTASKS; of these only RANK is set); start with torchrun, mpirun or srun, or use spawn"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "of these only RANK is set"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is not a rank of WORLD_SIZE=4; check how torchrun was started"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no whole number; check how the ranks were started"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK='x' is no whole number"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http' is no whole number"),
        ({**TORCHRUN, "MASTER_PORT": "65535"}, "MASTER_PORT=65535: the rendezvous takes the port after it, which must be 2 to 65535"),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"},
            "2 of 4 ranks run on this machine and MASTER_ADDR is not set; set it to the machine of rank 0",
        ),
        ({**SLURM, "SLURM_NNODES": "3"}, "the 4 ranks run on 3 machines and MASTER_ADDR is not set"),
    ],
)
def test_variables_that_cannot_be(variables, text):
    with pytest.raises(LauncherError) as caught:
        launched(variables)
    assert str(caught.value).startswith("EP316: ") and text in str(caught.value)


@pytest.mark.parametrize("port", ["http", "65536", "-1"])
def test_a_port_that_cannot_be(port):
    with pytest.raises(ValueError, match=f"EPDSL_PORT='{port}': (no whole number|a port from 1 to 65535, or 0)"):
        launched({**TORCHRUN, "EPDSL_PORT": port})


def test_port_0_is_the_one_after_the_launchers():
    assert launched({**TORCHRUN, "EPDSL_PORT": "0", "MASTER_PORT": "4000"}).port == 4001


def test_a_jobs_token_is_not_shown(monkeypatch):
    from epdsl_runtime.env import describe

    shown = {row.name: row.value for row in describe()}
    assert shown["EPDSL_TOKEN"] == ""
    monkeypatch.setenv("EPDSL_TOKEN", "the secret")
    assert {row.name: row.value for row in describe()} == {**shown, "EPDSL_TOKEN": "(set)"}


class Meeting:
    """What stands for another library's collective: threads exchange values by index."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.values = [None] * size

    def allgather(self, index, value):
        self.values[index] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class Communicator:
    """The part of an mpi4py communicator that is used."""

    def __init__(self, meeting, index):
        self._meeting, self._index = meeting, index

    def Get_rank(self):
        return self._index

    def Get_size(self):
        return self._meeting.size

    def allgather(self, value):
        return self._meeting.allgather(self._index, value)


def in_threads(body, size):
    outcomes = [None] * size

    def one(index):
        try:
            outcomes[index] = body(index)
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def test_ranks_of_a_communicator_meet(monkeypatch):
    monkeypatch.setattr("epdsl_runtime.spawn.open_spec", lambda spec: FakeDevice(spec.index or 0))
    monkeypatch.setattr("epdsl_runtime.spawn.device_count", lambda kind: 3)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    meeting = Meeting(3)
    ready = threading.Barrier(3, timeout=20)

    def body(index):
        rank = init("cuda", timeout=10, group=Communicator(meeting, index))
        found = rank.allgather((index, rank.device.info.index)), rank.bootstrap.health()[index].state
        ready.wait()
        rank.close()
        return found

    assert in_threads(body, 3) == [([(0, 0), (1, 1), (2, 2)], "running")] * 3


def test_a_rendezvous_that_cannot_be_opened_is_told_to_all(monkeypatch):
    def refuse(*args):
        raise LauncherError("EP316", "no ports are left")

    monkeypatch.setattr("epdsl_runtime.launchers.Hub", refuse)
    meeting = Meeting(2)
    outcomes = in_threads(lambda index: meet(Group("mpi4py", index, 2, Communicator(meeting, index).allgather), 5), 2)
    text = "EP316: rank 0 of the group of mpi4py: no ports are left"
    assert [str(outcome) for outcome in outcomes] == [text] * 2


def test_which_group_is_taken(monkeypatch):
    for name in ("torch", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert group_of() is None
    with pytest.raises(TypeError, match=r"is no process group of an initialised torch.distributed and no communicator"):
        group_of(7)
    mpi = types.SimpleNamespace(Is_initialized=lambda: True, COMM_WORLD=Communicator(Meeting(2), 1))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    found = group_of()
    assert found is not None and (found.library, found.index, found.size) == ("mpi4py", 1, 2)

    class ProcessGroup:
        pass

    def all_gather_object(out, value, group=None):
        out[:] = [(value, group)] * len(out)

    distributed = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        ProcessGroup=ProcessGroup,
        get_rank=lambda group: 4 if group is None else 1,
        get_world_size=lambda group: 8 if group is None else 2,
        all_gather_object=all_gather_object,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(distributed=distributed))
    found = group_of()
    assert found is not None and (found.library, found.index, found.size) == ("torch.distributed", 4, 8)
    part = ProcessGroup()
    found = group_of(part)
    assert found is not None and (found.index, found.allgather("x")) == (1, [("x", part)] * 2)


def test_ranks_of_two_versions_are_refused(monkeypatch):
    hub = ThreadHub(2)

    def body(index):
        made = Rank(index, 2, FakeDevice(index), ThreadBootstrap(hub, index, timeout=10))
        call = rank._Call("allgather", value=1, version=VERSION if index == 0 else "9.9")
        return made._collect(call)

    first, second = in_threads(body, 2)
    assert isinstance(first, Disagreement) and str(first) == f"EP312: rank 0 runs epdsl {VERSION}, rank 1 runs 9.9; install the same"
    assert str(second) == f"EP312: rank 1 runs epdsl 9.9, rank 0 runs {VERSION}; install the same"


def test_what_ranks_agree_on():
    hub = ThreadHub(2)

    def body(index):
        made = Rank(index, 2, FakeDevice(index), ThreadBootstrap(hub, index, timeout=10))
        made.agree("a layer", {"hidden": 4, "kernel dispatch": "ab12"})
        try:
            made.agree("a layer", {"hidden": 4, "kernel dispatch": f"ab1{index}"})
        except Disagreement as error:
            return str(error)

    assert in_threads(body, 2) == [
        "EP312: a layer: kernel dispatch differs by rank: rank 0 has 'ab10', rank 1 has 'ab11'",
        "EP312: a layer: kernel dispatch differs by rank: rank 1 has 'ab11', rank 0 has 'ab10'",
    ]


def test_the_version_is_the_projects():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
