"""Publishing to a peer that everything for it, or for one of its experts, has been written."""

from __future__ import annotations

from typing import Literal

import epdsl as ep

Ordering = Literal["acq_rel", "seed"]


@ep.func
def on_this_device(words: ep.Ptr[ep.u64]) -> ep.Ptr[ep.u64]:
    """A rank's own part of a peer table as memory of its own device, which device scope orders."""
    return ep.Ptr[ep.u64](ep.u64(words))  # pyright: ignore[reportCallIssue]


@ep.func
def ep_signal_completion(
    my_rank: ep.i32,
    dst_rank: ep.i32,
    recv_count_ptrs: ep.Peers[ep.u64],
    signal_offset: ep.i32,
    signal: ep.u64,
    rank_completion_counter: ep.Ptr[ep.i32],
    rank_flag_offset: ep.i32 = 0,  # pyright: ignore[reportArgumentType]
    *,
    p2p_world_size: int,
    use_shmem: bool = False,
    n_experts_per_device: int = 0,
    skip_a2a: bool = False,
    has_rank_flag: bool = False,
    ep_ord_r: bool = False,
    release_every: bool = False,
    ordering: str = "acq_rel",
) -> ep.i32:
    """Publishes `signal` (launch number << 32 | token count) in the destination's word `signal_offset`. One thread calls it.

    The caller must have everything it publishes before it in happens-before: its own stores, or other threads' stores that it
    acquired. Words are published at system scope, or at device scope with `skip_a2a`, where the destination is this device.
    `rank_completion_counter` has a word for each of the `p2p_world_size` ranks that peer access reaches, 0 between launches.

    Per-expert completion (`ep_ord_r` off). The destination waits for every word. The `n_experts_per_device` producers for a destination
    elect their last, and only its word is a release; the destination may read payload once it has acquired all words of a source.

        ordering="acq_rel"  The election is ACQ_REL at device scope and the other words are RELAXED. By induction the last producer happens
                            after all others, so its one release carries all their payload. It costs, against the seeds' ordering, one
                            device-scope acquire-release a word instead of a relaxed add: n_experts a launch, in different warps;
                            and p2p_world_size releases at system scope, the same.
        ordering="seed"     The original's exact ordering: RELAXED election, the other words plain stores (releases on AMD). It is racy.
                            Nothing orders one producer's payload before another's release, so the destination can see every word and
                            still read old payload; and a plain store races with the destination's polling of that word. To compare.
        release_every       Every word is a release and there is no election: for producers of which each must be seen on its own.
                            n_experts releases at system scope (about half a microsecond each on an H200).

    Rank-level completion (`ep_ord_r` with `has_rank_flag`): the word is a plain progress store before an ACQ_REL election, nobody may wait
    for it, and the last producer releases a flag at `rank_flag_offset` with the same launch number and n_experts_per_device as its
    value; then it sets the counter back. The destination acquires once a source rank.

    Returns the election ticket, or -1 without an election.
    """
    assert not use_shmem, "ep_signal_completion: use_shmem=True needs the SHMEM path, which does not exist here; leave use_shmem at False"
    assert has_rank_flag == ep_ord_r, "ep_signal_completion: has_rank_flag and ep_ord_r go together; set both or neither"
    assert not (ep_ord_r and release_every), "ep_signal_completion: release_every and ep_ord_r exclude each other"
    assert ordering in ("acq_rel", "seed"), f"ep_signal_completion: ordering={ordering!r} is not known; it is 'acq_rel' or 'seed'"
    assert release_every or n_experts_per_device > 0, "ep_signal_completion: an election needs n_experts_per_device"
    scope = ep.DEVICE if skip_a2a else ep.SYSTEM
    words = recv_count_ptrs[dst_rank]
    if skip_a2a:
        words = on_this_device(words)
    word = words + signal_offset
    counter = rank_completion_counter + dst_rank % p2p_world_size
    ticket = ep.i32(-1)
    if ep_ord_r:
        word[0] = signal
        # Pairs with itself in the other producers: the add releases this producer's payload and count word and acquires every earlier
        # producer's, so the last one happens after them all. Device scope is enough, as all producers are on this device.
        ticket = ep.atomic_add(counter, 1, order=ep.ACQ_REL, scope=ep.DEVICE)
        if ticket == n_experts_per_device - 1:
            flag = ((signal >> 32) << 32) | n_experts_per_device
            # Pairs with the destination's wait on its rank flag; cumulative over all that the election acquired.
            ep.store(words + rank_flag_offset, flag, order=ep.RELEASE, scope=scope)
            # Plain: every producer of this launch has added, and the next launch begins after this one.
            counter[0] = 0
    elif release_every:
        # Pairs with the destination's wait on this word.
        ep.store(word, signal, order=ep.RELEASE, scope=scope)
    else:
        # ACQ_REL pairs with itself in the other producers, as above. RELAXED is the original's and pairs with nothing.
        ticket = ep.atomic_add(counter, 1, order=ep.RELAXED if ordering == "seed" else ep.ACQ_REL, scope=ep.DEVICE)
        if ticket == n_experts_per_device - 1:
            # Pairs with the destination's wait on this word; cumulative over all that the election acquired.
            ep.store(word, signal, order=ep.RELEASE, scope=scope)
            counter[0] = 0
        elif ordering == "seed" and ep.target.vendor == "nvidia":
            word[0] = signal
        elif ordering == "seed":
            # Pairs with the destination's wait on this word, for this producer's payload alone.
            ep.store(word, signal, order=ep.RELEASE, scope=scope)
        else:
            # Relaxed: the destination reads payload only after the last producer's word, which carries ours.
            ep.store(word, signal, order=ep.RELAXED, scope=scope)
    return ticket


@ep.func
def wait_for_consumption(consumed: ep.Ptr[ep.u32], epoch: ep.u32, n_ranks: int, timeout_ns: int, group):
    """All threads of `group` wait until every rank has used up what this rank sent it in the launch before `epoch`.

    Only then may a receive buffer or a count word be written again. `consumed` is this rank's own row of acknowledgements: word r is
    written by rank r when it leaves its launch. A rank may have consumed `epoch` itself by now, where nothing that the calling block sends
    goes to it, but no more than that. The difference is signed, so the number may wrap.
    """
    for r in range(ep.thread_idx.x - group.thread_base, n_ranks, group.num_threads):
        # Pairs with the store in `acknowledge_and_rest` on rank r: its reads of its receive buffer happen before our writes to it.
        ep.wait(consumed + r, until=lambda v: ep.i32(v - epoch) >= -1, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=timeout_ns)
    ep.group_barrier(group)


@ep.func
def acknowledge_and_rest(
    cleanup_counter: ep.Ptr[ep.i32],
    epoch_word: ep.Ptr[ep.u32],
    consumed_ptrs: ep.Peers[ep.u32],
    my_rank: ep.i32,
    epoch: ep.u32,
    n_sms: int,
    n_ranks: int,
    group,
):
    """All threads of `group` call it as their last act of a launch. The last block to do so ends the launch for this rank.

    It sets the counter back, moves this rank to launch number `epoch`, and tells every rank that what it sent has been used up.
    n_ranks is 0 where no other rank sends.
    """
    ep.group_barrier(group)
    if ep.thread_idx.x == group.thread_base:
        # Pairs with itself in the other blocks: the last block happens after every block's reads of the receive buffer and of the
        # epoch word.
        left = ep.atomic_add(cleanup_counter, 1, order=ep.ACQ_REL, scope=ep.DEVICE)
        if left == n_sms - 1:
            cleanup_counter[0] = 0
            epoch_word[0] = epoch
            if n_ranks:
                # One fence for all peers; with each relaxed store below it makes a release that pairs with `wait_for_consumption`.
                ep.fence(order=ep.RELEASE, scope=ep.SYSTEM)
                for r in range(n_ranks):
                    ep.store(consumed_ptrs[r] + my_rank, epoch, order=ep.RELAXED, scope=ep.SYSTEM)


@ep.func
def record_fault(status: ep.Ptr[ep.u64], row: ep.i32, column: ep.i32):
    """Counts a fault and keeps the smallest place it was seen at. `status` points at the kind's two words.

    Relaxed: the host reads them after the launch has ended, and nothing is ordered by them.
    """
    ep.reduce_add(status, 1, order=ep.RELAXED, scope=ep.DEVICE)
    ep.reduce_min(status + 1, (ep.u64(row) << 32) | ep.u64(column), order=ep.RELAXED, scope=ep.DEVICE)
