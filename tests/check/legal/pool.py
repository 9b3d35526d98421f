"""Blocks of all ranks take slots in each rank's pool with a cursor that lives there; launches follow each other without the host."""

import epdsl as ep

RANKS, BLOCKS, THREADS, LAUNCHES = 2, 2, 64, 4
SLOTS = 2 * RANKS * BLOCKS


@ep.kernel
def gather(
    rows: ep.Peers[ep.u32],
    cursor: ep.Peers[ep.u32],
    arrived: ep.Peers[ep.u32],
    freed: ep.Peers[ep.u32],
    sent: ep.Ptr[ep.u32],
    used: ep.Ptr[ep.u32],
    out: ep.Ptr[ep.u32],
    me: ep.i32,
    launch: ep.u32,
):
    slot = ep.shared(ep.u32, RANKS)
    t = ep.thread_idx.x
    # Pairs with the release below: that rank has read what the launch before put into its pool, and set its cursor back.
    if t < RANKS:
        ep.wait(freed[me] + t, until=lambda v: v == launch - 1, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)
    ep.barrier()
    # The second launch sends rank 1 nothing.
    sends = t < RANKS and (t != 1 or launch != 2)
    if sends:
        # Hands out slots and orders nothing.
        slot[t] = ep.atomic_add(cursor[t], 1, order=ep.RELAXED, scope=ep.SYSTEM)
    ep.barrier()
    if sends:
        rows[t][slot[t]] = launch
    ep.barrier()
    if t == 0:
        # Pairs with itself in the other blocks.
        if ep.atomic_add(sent, 1, order=ep.ACQ_REL, scope=ep.DEVICE) == BLOCKS - 1:
            sent[0] = 0
            # Pairs with the wait for the arrivals; the adds themselves are relaxed.
            ep.fence(order=ep.RELEASE, scope=ep.SYSTEM)
            for r in range(RANKS):
                ep.atomic_add(arrived[r], 1, order=ep.RELAXED, scope=ep.SYSTEM)
        ep.wait(arrived[me], until=lambda v: v == launch * RANKS, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)
    ep.barrier()
    n = ep.load(cursor[me], order=ep.RELAXED, scope=ep.SYSTEM)
    for i in range(t, ep.i32(n), THREADS):
        out[ep.block_idx.x * SLOTS + i] = rows[me][i]
    ep.barrier()
    if t == 0:
        # Pairs with itself in the other blocks.
        if ep.atomic_add(used, 1, order=ep.ACQ_REL, scope=ep.DEVICE) == BLOCKS - 1:
            used[0] = 0
            ep.store(cursor[me], 0, order=ep.RELAXED, scope=ep.SYSTEM)
            for r in range(RANKS):
                # Pairs with the wait at the beginning of the next launch.
                ep.store(freed[r] + me, launch, order=ep.RELEASE, scope=ep.SYSTEM)


@ep.scenario(ranks=RANKS)
def main(rank):
    rows, cursor = rank.symmetric(ep.u32, SLOTS, "rows"), rank.symmetric(ep.u32, 1, "cursor")
    arrived = rank.symmetric(ep.u32, 1, "arrived")
    freed = rank.symmetric(ep.u32, RANKS, "freed", writer=lambda word: word)
    sent, used, out = rank.zeros(ep.u32, 1), rank.zeros(ep.u32, 1), rank.zeros(ep.u32, BLOCKS * SLOTS)
    ep.control_words(sent, name="sent")
    ep.control_words(used, name="used")
    rank.barrier()
    for launch in range(1, LAUNCHES + 1):
        words = (rows.peers, cursor.peers, arrived.peers, freed.peers, sent, used, out)
        gather.launch(rank, grid=BLOCKS, block=THREADS, args=(*words, rank.index, launch), cooperative=True)
    rank.synchronize()
