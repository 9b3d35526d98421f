"""The rendezvous when what comes is wrong, late, half, or something else: every end is named, in time, and nobody waits for more."""

import contextlib
import socket
import threading
import time

import pytest
from epdsl_runtime.bootstrap import BootstrapTimeout, LauncherError, RankFailed, Refused, ThreadBootstrap, ThreadHub
from epdsl_runtime.health import Activity
from epdsl_runtime.rendezvous import Hub, SocketBootstrap
from epdsl_runtime.wire import GATHER, HEADER, connect, listen, receive
from test_runtime_bootstrap import TOKEN, connect_all


def states(hub):
    return [(found.state, found.why) for found in hub.health()]


def eventually(look, wanted):
    deadline = time.monotonic() + 10
    while (found := look()) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found == wanted


def test_a_frame_that_has_begun_is_read_to_its_end():
    """The deadline falls between its parts; given up there, its rest would be taken for the next frame."""
    near, far = socket.socketpair()
    frame = HEADER.pack(GATHER, 3, 7, 5) + b"hello"

    def send_slowly():
        for part in (frame[:4], frame[4:23], frame[23:]):
            far.sendall(part)
            time.sleep(0.15)

    thread = threading.Thread(target=send_slowly)
    with near, far:
        thread.start()
        assert receive(near, time.monotonic() + 0.1) == (GATHER, 3, 7, b"hello")
        thread.join(10)
        with pytest.raises(TimeoutError):
            receive(near, time.monotonic() + 0.05)


@pytest.mark.parametrize(("of_hub", "of_rank"), [(2, 3), (3, 2)])
def test_ranks_of_another_number_of_ranks_are_refused(of_hub, of_rank):
    hub = Hub(of_hub, TOKEN)
    (zero,) = connect_all(hub, ranks=[0])
    text = f"rank 1 was started as one of {of_rank} ranks, and rank 0 as one of {of_hub}; start all with the same number"
    with pytest.raises(LauncherError, match=text):
        SocketBootstrap(1, of_rank, hub.address, TOKEN, timeout=5)
    with pytest.raises(RankFailed, match=text) as caught:
        zero.barrier()
    assert caught.value.rank == 1
    hub.close()


def test_who_was_refused_is_told_with_who_is_missing():
    hub = Hub(3, TOKEN)
    zero, _ = connect_all(hub, timeout=1.0)
    for number, text in ((1, "rank 1 came twice"), (7, "rank 7 is not one of 3")):
        with pytest.raises(Refused, match=text):
            connect(number, hub.address, TOKEN, 5)
    with pytest.raises(BootstrapTimeout) as caught:
        zero.barrier()
    wanted = "EP311: rank 0 waited 1 s for the other ranks; missing: rank 1, 2; "
    assert str(caught.value) == wanted + "rank 1 came twice, and was refused; rank 7 is not one of 3, and was refused"
    hub.close()


def test_rank_0_does_not_wait_at_its_end_for_ranks_that_it_has_waited_for():
    hub = Hub(2, TOKEN)
    zero = SocketBootstrap(0, 2, hub.address, TOKEN, hub, timeout=0.2)
    with pytest.raises(BootstrapTimeout, match="missing: rank 1"):
        zero.barrier()
    start = time.monotonic()
    zero.close()
    assert time.monotonic() - start < 3


def test_rank_0_that_fails_at_once_still_tells_a_rank_that_comes_later():
    hub = Hub(2, TOKEN)
    zero = SocketBootstrap(0, 2, hub.address, TOKEN, hub, timeout=20)
    zero.abort("no such file")
    closing = threading.Thread(target=zero.close)
    closing.start()
    time.sleep(0.5)
    (one,) = connect_all(hub, ranks=[1])
    with pytest.raises(RankFailed, match="no such file"):
        one.barrier()
    one.close()
    closing.join(10)
    assert not closing.is_alive()


def test_what_became_of_each_rank_after_a_failure():
    """Rank 1 fails; 0 closes, 2 goes on without it, 3 fails by itself, 4 ends without a word, 5 is there."""
    hub = Hub(6, TOKEN)
    ranks = connect_all(hub, ranks=range(6))
    for rank in ranks:
        rank.report(lambda: Activity("its own work", 0.0))
    ranks[1].abort("Traceback (most recent call last):\n  File\nValueError: a bug")
    eventually(lambda: states(hub)[1], ("failed", "ValueError: a bug"))
    ranks[0].close()
    ranks[2]._leave(0.0, "goes on without rank 1")
    ranks[3].abort("KeyError: 7")
    ranks[3].close()
    ranks[4]._connection.shutdown(socket.SHUT_RDWR)
    wanted = [
        ("left", "after rank 1 failed"),
        ("failed", "ValueError: a bug"),
        ("left", "goes on without rank 1"),
        ("failed", "KeyError: 7"),
        ("left", "after rank 1 failed"),
        ("running", ""),
    ]
    eventually(lambda: states(hub), wanted)
    assert str(hub.health()[0]) == "rank 0: left (after rank 1 failed)"
    for rank in ranks:
        rank.close()
    hub.close()


def test_a_rank_that_came_and_says_nothing():
    hub = Hub(2, TOKEN)
    (zero,) = connect_all(hub, ranks=[0])
    eventually(lambda: states(hub), [("running", ""), ("absent", "")])
    hub._lines[0].since -= 7
    assert str(hub.health()[0]) == "rank 0: running (nothing was heard of it for 7.0 s)"
    zero.close()
    hub.close()


def test_what_became_of_threads_after_a_failure():
    hub = ThreadHub(4)
    ranks = [ThreadBootstrap(hub, index, timeout=10) for index in range(4)]
    ranks[0].close()
    hub.abort(1, "ValueError: a bug")
    ranks[2].close()
    hub.abort(3, "KeyError: 7")
    assert states(hub) == [("left", ""), ("failed", "ValueError: a bug"), ("left", "after rank 1 failed"), ("failed", "KeyError: 7")]


@pytest.mark.parametrize(("in_a_meeting", "text", "within"), [(False, "is gone: its process ended", 0.5), (True, "does not answer", 4)])
def test_health_is_refused_soon_when_the_rendezvous_has_ended(in_a_meeting, text, within):
    """In a meeting of another thread the first connection cannot be looked at."""
    hub = Hub(2, TOKEN)
    zero, one = connect_all(hub)
    hub.close()
    zero.report(lambda: Activity("its own work", 0.0))
    time.sleep(0.7)
    start = time.monotonic()
    with zero._lock if in_a_meeting else contextlib.nullcontext(), pytest.raises(RankFailed, match=f"the rendezvous {text}"):
        zero.health()
    assert time.monotonic() - start < within
    zero.close()
    one.close()


def strangers(how):
    """Listens, and treats who comes as another program might. Returns its address and what ends it."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.append(connection)
            if how == "talks":
                connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n" * 10)
            elif how == "closes":
                connection.close()

    threading.Thread(target=serve, daemon=True).start()
    return listener, listener.getsockname()


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("is silent", BootstrapTimeout, "EP311: rank 1: the rendezvous at {} accepts connections and does not answer; its process may be"),
        ("talks", Refused, "EP316: rank 1 was refused by the rendezvous at {}: it does not know this job's token; its process may have"),
        ("closes", Refused, "EP316: rank 1 was refused by the rendezvous at {}: the connection was closed; its process may have ended, "),
    ],
)
def test_another_program_at_the_port(how, error, text):
    listener, address = strangers(how)
    start = time.monotonic()
    with listener, pytest.raises(error) as caught:
        connect(1, address, TOKEN, 0.5)
    assert str(caught.value).startswith(text.format(f"127.0.0.1:{address[1]}")) and time.monotonic() - start < 3
    with pytest.raises(LauncherError) as caught, socket.create_server(("127.0.0.1", 0)) as taken:
        Hub(2, TOKEN, taken.getsockname())
    assert "Address already in use; another program, another job or another rank 0 does. Set EPDSL_PORT to a free port" in str(caught.value)


@pytest.mark.parametrize("host", ["a" * 300, "a..b"])
def test_what_is_no_host_name_is_refused_at_once(host):
    with pytest.raises(LauncherError, match=r"EP316: rank 1 cannot reach '.*': that is no host name; correct MASTER_ADDR"):
        connect(1, (host, 5), TOKEN, 60)


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(("listens", "host"), [("::1", "::1"), ("", "::1"), ("", "127.0.0.1")])
def test_ranks_meet_by_ipv6_and_by_ipv4_at_one_listener(listens, host):
    hub = Hub(3, TOKEN, (listens, 0))
    made = [SocketBootstrap(index, 3, (host, hub.address[1]), TOKEN, timeout=5) for index in range(3)]
    found = {}

    def body(rank):
        found[rank.index] = [rank.allgather(rank.index)]
        if rank.index:
            left = rank.without((0,), timeout=5)
            found[rank.index].append(left.allgather(left.index))
            left.close()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: [[0, 1, 2]], 1: [[0, 1, 2], [0, 1]], 2: [[0, 1, 2], [0, 1]]}
    made[0].close()
    hub.close()


def test_a_machine_without_ipv6_listens_by_ipv4(monkeypatch):
    real = socket.create_server

    def create(address, **options):
        if options.get("family") == socket.AF_INET6:
            raise OSError(99, "Cannot assign requested address")
        return real(address, **options)

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    monkeypatch.setattr(socket, "create_server", create)
    with listen(("", 0), 4) as listener:
        assert listener.family == socket.AF_INET
