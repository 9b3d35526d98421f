"""How ranks come to share memory: the kinds tried, descriptors passed between processes, other libraries' arrays, on host memory."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from epdsl_runtime import fd_passing
from epdsl_runtime.rank import CollectiveError
from epdsl_runtime.sharing import NoSharing, try_here
from runtime_fakes import FakeDevice
from test_runtime_rank import each, exchange


def prepare(rank, broken, kinds=("first", "second", "third"), wanted=None):
    rank.device.share_kinds = kinds
    rank.device.broken_kinds = broken.get(rank.index, {})
    rank._wanted_sharing = wanted


def test_the_first_kind_that_works_between_all_ranks_is_taken(caplog):
    caplog.set_level("INFO", "epdsl.runtime")
    broken = {1: {"first": "no such handle"}, 2: {"first": "none either", "third": "unused"}}

    def body(rank):
        prepare(rank, broken)
        assert [kind for kind, why in try_here(rank.device) if why is None] == [
            k for k in rank.device.share_kinds if k not in broken.get(rank.index, {})
        ]
        found = str(rank.sharing())
        return found, exchange(rank)

    outcomes, devices = each(body, 3)
    assert [o[0] for o in outcomes] == ["second (no first: rank 1: no such handle)"] * 3
    assert [o[1] for o in outcomes] == [[[source, rank] for source in range(3)] for rank in range(3)]
    assert all(not device._maps for device in devices), "memory of a trial is left"
    assert caplog.text.count("peer memory by second (no first: rank 1: no such handle)") == 3


def test_a_kind_whose_writes_do_not_arrive_is_not_taken():
    def body(rank):
        prepare(rank, {})
        if rank.index == 0:
            real, count = rank.device.open_memory, []

            def astray(handle):
                # The first trial maps something else than the peer's memory.
                count.append(1)
                return real(handle if len(count) > 1 else rank.device.export_memory(rank.device.allocate(64)))

            rank.device.open_memory = astray
        return str(rank.sharing())

    outcomes, _ = each(body, 2)
    expected = "the ranks wrote their numbers into one another's memory and rank 1 found [-1, 1]"
    assert outcomes == [f"second (no first: rank 1: {expected})"] * 2


@pytest.mark.parametrize(
    ("wanted", "broken", "text"),
    [
        (
            None,
            {0: {"first": "a", "second": "b"}, 1: {"third": "c"}},
            "no kind of peer memory works between the 2 ranks: first: rank 0: a; second: rank 0: b; third: rank 1: c",
        ),
        ("third", {1: {"third": "c"}}, r"peer memory by third was asked for \(EPDSL_PEER_MEMORY\) and does not work: third: rank 1: c"),
    ],
)
def test_without_a_kind_that_works_every_rank_is_told_why(wanted, broken, text):
    def body(rank):
        prepare(rank, broken, wanted=wanted)
        with pytest.raises(NoSharing, match=text):
            rank.symmetric("f32", 4)
        assert not rank.device._maps
        return "refused"

    assert each(body, 2)[0] == ["refused"] * 2


def test_a_kind_can_be_forced_and_must_be_the_same_on_every_rank(monkeypatch):
    def forced(rank):
        prepare(rank, {})
        return str(rank.sharing())

    monkeypatch.setenv("EPDSL_PEER_MEMORY", "third")
    assert each(forced, 2)[0] == ["third"] * 2
    monkeypatch.setenv("EPDSL_PEER_MEMORY", "smoke")
    assert "has first, second, third (EPDSL_PEER_MEMORY, or auto)" in str(each(forced, 1)[0][0])
    monkeypatch.delenv("EPDSL_PEER_MEMORY")

    def different(rank):
        prepare(rank, {}, wanted=("first", "second")[rank.index])
        with pytest.raises(CollectiveError, match=r"peer memory differs by rank: rank \d has \('(first|second)',\), rank \d has"):
            rank.sharing()
        return "refused"

    assert each(different, 2)[0] == ["refused"] * 2


def test_ranks_on_one_gpu_are_warned():
    def body(rank):
        prepare(rank, {})
        rank.device.info = replace(rank.device.info, uuid="GPU-a" if rank.index != 1 else "GPU-b")
        rank.sharing()

    with pytest.warns(UserWarning, match="ranks 0, 2 are all on GPU-a"):
        each(body, 3)


class Tensor:
    """Another library's array: memory of the fake that somebody else allocated."""

    def __init__(self, device, values):
        self.address = device.allocate(values.nbytes)
        device.upload(self.address, values)
        self.values = np.ctypeslib.as_array((np.ctypeslib.as_ctypes_type(values.dtype) * values.size).from_address(self.address))
        self.shape = values.shape

    def __dlpack__(self, **_):
        return self.values.__dlpack__()

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def test_another_librarys_array_becomes_a_symmetric_buffer():
    def body(rank):
        tensor = Tensor(rank.device, np.full(4, rank.index, np.int32))
        made = rank.register(tensor, "a tensor")
        assert made.local.address == tensor.address and made.local.numpy().tolist() == [rank.index] * 4
        rank.barrier()
        for peer in range(rank.size):
            if peer != rank.index:
                rank.device.upload(made.peers.addresses[peer] + 4 * rank.index, np.array([100 + rank.index], np.int32))
        rank.barrier()
        found = tensor.values.tolist()
        with pytest.raises(CollectiveError, match="register differs by rank"):
            rank.register(Tensor(rank.device, np.zeros(2 + rank.index, np.int32)))
        rank.release(made)
        return found, [kind for kind, _ in rank.device.events]

    outcomes, _ = each(body, 2)
    assert [found for found, _ in outcomes] == [[0, 101, 0, 0], [100, 1, 1, 1]]
    # Unmapped by both before it is withdrawn; never freed by us.
    assert all(events == ["open", "withdraw", "close", "free", "withdraw"] for _, events in outcomes)


def test_what_cannot_be_registered():
    def body(rank):
        with pytest.raises(TypeError, match="registered buffer 0: ndarray is no array of another library"):
            rank.register(np.zeros(4))
        with pytest.raises(ValueError, match="with strides"):
            rank.register(_Strided())
        rank.device.export_foreign = _refuses
        with pytest.raises(CollectiveError, match=r"register failed on rank 0 .*made them without a handle"):
            rank.register(Tensor(rank.device, np.zeros(4, np.int32)))
        return "refused"

    assert each(body, 1)[0] == ["refused"]


class _Strided:
    def __dlpack__(self, **_):
        return np.arange(4, dtype=np.int32)[::2].__dlpack__()

    def __dlpack_device__(self):
        return 1, 0


def _refuses(address, nbytes):
    raise RuntimeError("their allocator made them without a handle for other processes")


FETCH = """
import os, pickle, sys
from epdsl_runtime.fd_passing import fetch
fd = fetch(pickle.loads(bytes.fromhex(sys.argv[1])))
print(os.pread(fd, 5, 0).decode(), os.get_inheritable(fd))
"""


def test_a_descriptor_reaches_another_process(tmp_path):
    import pickle

    path = tmp_path / "file"
    path.write_text("hello")
    descriptor = os.open(path, os.O_RDONLY)
    ticket = fd_passing.offer(descriptor)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FETCH, pickle.dumps(ticket).hex()], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["hello", "False"], done.stderr
    copies = [fd_passing.fetch(ticket) for _ in range(3)]
    assert len({descriptor, *copies}) == 4
    fd_passing.withdraw(ticket)
    with pytest.raises(ConnectionError, match="no longer offers it"):
        fd_passing.fetch(ticket)
    wrong = replace(ticket, token=b"x" * 32)
    with pytest.raises(ConnectionError, match="no longer offers it"):
        fd_passing.fetch(wrong)
    for one in (descriptor, *copies):
        os.close(one)


FETCH_WITHOUT_ROOM = """
import os, pickle, resource, sys
from epdsl_runtime.fd_passing import fetch
ticket = pickle.loads(bytes.fromhex(sys.argv[1]))
free = os.dup(0)
os.close(free)
# Room for the connection alone.
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    fetch(ticket)
except ConnectionError as error:
    print(f"{free + 1}: {error}")
"""


def test_a_descriptor_that_there_is_no_room_for():
    import pickle

    read, write = os.pipe()
    ticket = fd_passing.offer(read)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FETCH_WITHOUT_ROOM, pickle.dumps(ticket).hex()]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    most = done.stdout.partition(":")[0]
    assert done.stdout == (
        f"{most}: a file descriptor of another rank came and there is no room for it: this process may have {most} (ulimit -n)\n"
    ), done.stderr
    fd_passing.withdraw(ticket)
    os.close(read)
    os.close(write)


def test_a_process_that_is_gone_or_silent_is_an_error_in_bounded_time():
    import socket

    with pytest.raises(ConnectionError, match=r"could not be fetched: .*; ranks exchange them when they share a network namespace"):
        fd_passing.fetch(fd_passing.Ticket(b"\0epdsl-nobody", b"x" * 32))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0epdsl-silent-" + str(os.getpid()).encode())
        listener.listen()
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="could not be fetched: timed out"):
            fd_passing.fetch(fd_passing.Ticket(listener.getsockname(), b"x" * 32), timeout=0.3)
        assert time.monotonic() - start < 3


def test_many_fetches_at_once():
    read, write = os.pipe()
    ticket = fd_passing.offer(read)
    copies = []
    threads = [threading.Thread(target=lambda: copies.append(fd_passing.fetch(ticket))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    os.write(write, b"z" * 16)
    assert [os.read(copy, 1) for copy in copies] == [b"z"] * 16
    fd_passing.withdraw(ticket)
    for one in (read, write, *copies):
        os.close(one)


def test_devices_say_what_they_can_share():
    device = FakeDevice()
    device.share_kinds = ("a", "b")
    device.broken_kinds = {"a": "not permitted\nsecond line"}
    assert try_here(device) == [("a", "not permitted"), ("b", None)] and not device._maps
