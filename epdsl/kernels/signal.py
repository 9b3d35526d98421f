"""Publishing to a peer that everything for it, or for one of its experts, has been written."""

from __future__ import annotations

import epdsl as ep


@ep.func
def ep_signal_completion(
    my_rank: ep.i32,
    dst_rank: ep.i32,
    recv_count_ptrs: ep.Peers[ep.u64],
    signal_offset: ep.i32,
    signal: ep.u64,
    rank_completion_counter: ep.Ptr[ep.i32],
    rank_flag_offset: ep.i32,
    n_experts_per_device: int,
    ep_ord_r: bool,
) -> ep.i32:
    """Writes `signal` (launch number << 32 | token count) to the destination's word `signal_offset`. One thread calls it.

    The caller must have everything it publishes before it in happens-before: its own stores, or other threads' stores that it
    acquired.

    Per-expert completion (`ep_ord_r` off): each word is a release store at system scope, and the destination acquires each word it
    waits for. That is n_experts system-scope releases a launch (about half a microsecond each on an H200, spread over the monitor
    warps). Electing a last producer with a relaxed counter and publishing only that producer's release, with plain stores for the
    other words, would be cheaper and is wrong: nothing would order the other producers' payload before their words.

    Rank-level completion (`ep_ord_r` on): the word is a plain progress store, nobody may wait for it, and the last of the
    `n_experts_per_device` producers for this destination releases one flag at `rank_flag_offset`, with the same launch number and
    n_experts_per_device as its value. That is n_ranks system-scope releases a launch.

    Returns the election ticket, or -1 without an election.
    """
    word = recv_count_ptrs[dst_rank] + signal_offset
    ticket = ep.i32(-1)
    if ep_ord_r:
        word[0] = signal
        # Pairs with itself in the other producers: the add releases this producer's payload and count word and acquires every earlier
        # producer's, so the last one happens after them all. Device scope is enough, as all producers are on this device.
        ticket = ep.atomic_add(rank_completion_counter + dst_rank, 1, order=ep.ACQ_REL, scope=ep.DEVICE)
        if ticket == n_experts_per_device - 1:
            flag = ((signal >> 32) << 32) | n_experts_per_device
            # Pairs with the destination's wait on its rank flag; cumulative over all that the election acquired.
            ep.store(recv_count_ptrs[dst_rank] + rank_flag_offset, flag, order=ep.RELEASE, scope=ep.SYSTEM)
            # Plain: every producer of this launch has added, and the next launch begins after this one.
            rank_completion_counter[dst_rank] = 0
    else:
        # Pairs with the destination's wait on this word.
        ep.store(word, signal, order=ep.RELEASE, scope=ep.SYSTEM)
    return ticket


@ep.func
def wait_for_consumption(consumed: ep.Ptr[ep.u32], epoch: ep.u32, n_ranks: int, timeout_ns: int):
    """The whole block waits until every rank has used up what this rank sent it in the launch before `epoch`.

    Only then may a receive buffer or a count word be written again. `consumed` is this rank's own row of acknowledgements: word r is
    written by rank r when it leaves its launch. A rank cannot have consumed `epoch` itself yet, so equality is exact, also when the
    number wraps.
    """
    for r in range(ep.thread_idx.x, n_ranks, ep.block_dim.x):
        # Pairs with the store in `acknowledge_and_rest` on rank r: its reads of its receive buffer happen before our writes to it.
        ep.wait(consumed + r, until=lambda v: v == epoch - 1, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=timeout_ns)
    ep.barrier()


@ep.func
def acknowledge_and_rest(
    cleanup_counter: ep.Ptr[ep.i32],
    epoch_word: ep.Ptr[ep.u32],
    consumed_ptrs: ep.Peers[ep.u32],
    my_rank: ep.i32,
    epoch: ep.u32,
    n_sms: int,
    n_ranks: int,
):
    """The whole block calls it as its last act of a launch. The last block to do so ends the launch for this rank.

    It sets the counter back, moves this rank to launch number `epoch`, and tells every rank that what it sent has been used up.
    """
    ep.barrier()
    if ep.thread_idx.x == 0:
        # Pairs with itself in the other blocks: the last block happens after every block's reads of the receive buffer and of the
        # epoch word.
        left = ep.atomic_add(cleanup_counter, 1, order=ep.ACQ_REL, scope=ep.DEVICE)
        if left == n_sms - 1:
            cleanup_counter[0] = 0
            epoch_word[0] = epoch
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
