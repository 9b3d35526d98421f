"""Atomics, fences, barriers: what orders the threads of a job, by PTX or by AMDGPU."""

from __future__ import annotations

import epdsl as ep

from .layout import (
    A_CHAIN,
    A_FLOOR,
    A_LATEST,
    A_RING,
    A_TAKEN,
    A_TAKEN_NUMBER,
    A_USERS,
    B_WAITED,
    B_WAITED_INFO,
    B_WAITED_STORE,
    B_WAITED_WRITER,
    C_ORDINAL,
    C_RANK,
    C_SITES,
    FIRST_ATOMIC,
    FIRST_WRITES,
    FLAG_NO_RESULT,
    FLAG_WAIT,
    FOUND_MIXED_SIZE,
    FOUND_OVERWRITE,
    FOUND_SCOPE_RACE,
    FOUND_STALE_LAUNCH,
    INFO_FLAGS,
    INFO_SITE,
    INFO_SIZE,
    K_ACCESS,
    K_LAUNCHES,
    K_MODEL,
    K_RANDOM,
    K_SC,
    K_WEAK,
    KIND_ATOMIC_LOAD,
    KIND_ATOMIC_STORE,
    MODEL_PTX,
    ORDER_SEQ_CST,
    P_MESSAGES,
    P_NEXT,
    RING,
    SECOND_ATOMIC,
    SECOND_WRITES,
    STORE_WORDS,
    U_BLOCK,
    U_NEXT,
    U_RANK,
    U_READ_EPOCH,
    U_READ_INFO,
    U_READ_NUMBER,
    U_READ_SCOPE,
    U_SIZE,
    U_TID,
    U_WRITE_EPOCH,
    U_WRITE_INFO,
    U_WRITE_NUMBER,
    U_WRITE_SCOPE,
    USER_WORDS,
    W_ATOMIC,
    W_BLOCK,
    W_INFO,
    W_MESSAGES,
    W_NUMBER,
    W_RANK,
    W_READERS,
    W_SCOPE,
    W_VALUE,
    W_WRITER,
    X_ADDRESS,
    X_BLOCK,
    X_CLOCK,
    X_EPOCH,
    X_LAUNCH,
    X_LOCATION,
    X_OWNED,
    X_PENDING,
    X_RANK,
    X_RELEASE,
    X_RESULT,
    X_SELF,
    X_SEQUENCE,
    X_SITES,
    X_STALE_ADDRESS,
    X_STALE_COUNT,
    X_TID,
    X_WAIT_LOCATION,
    X_WAIT_OBJECT,
    X_WAIT_SITE,
    X_WAIT_STORE,
)
from .meet import block_of
from .messages import acquire, acquires, effective, message_of, pruned, publish, releases, remember, tick
from .words import LOW, Words, alloc, at, host_call, inclusive, now, ordered, place, pointer, report

MOST_STALE = 4


@ep.func
def sequential(k: Words, x: Words, scope: ep.u64, info: ep.u64):
    """A sequentially consistent fence: it comes after every earlier one that each includes the other."""
    acquire(k, x, k[K_SC], scope, info)
    x[X_OWNED] = 0
    k[K_SC] = message_of(k, x, pruned(k, k[K_SC]), now(x), x[X_CLOCK], scope, x[X_SITES] + (info >> INFO_SITE))
    tick(x)


@ep.func
def fence(k: Words, x: Words, order: ep.u64, scope: ep.u64, info: ep.u64):
    if acquires(order):
        node = at(x, X_PENDING)
        x[X_PENDING] = 0
        while ep.u64(node) != 0:
            after = node[P_NEXT]
            # What was out of this fence's scope may be in a later one's.
            if not acquire(k, x, node[P_MESSAGES], scope, info):
                node[P_NEXT] = x[X_PENDING]
                x[X_PENDING] = ep.u64(node)
            node = pointer(after)
    if order == ORDER_SEQ_CST:
        sequential(k, x, scope, info)
    if releases(order):
        x[X_OWNED] = 0
        for s in ep.unroll(range(3)):
            if s + 1 <= scope:
                x[X_RELEASE + 2 * s] = 0
            if s + 1 == scope:
                x[X_RELEASE + 2 * s] = x[X_CLOCK]
                x[X_RELEASE + 2 * s + 1] = now(x)
        tick(x)


@ep.func
def user_of(k: Words, x: Words, location: Words):
    """The thread's own entry in the list of a location's users."""
    user = at(location, A_USERS)
    while ep.u64(user) != 0 and user[U_TID] != x[X_TID]:
        user = at(user, U_NEXT)
    if ep.u64(user) == 0:
        user = alloc(k, USER_WORDS)
        user[U_TID] = x[X_TID]
        user[U_RANK] = x[X_RANK]
        user[U_NEXT] = location[A_USERS]
        location[A_USERS] = ep.u64(user)
    user[U_BLOCK] = x[X_BLOCK]
    return user


@ep.func
def check_strong(k: Words, x: Words, location: Words, reads: ep.i1, writes: ep.i1, scope: ep.u64, size: ep.u64, info: ep.u64):
    """Every conflicting atomic access must happen before this one, or each must be in the other's scope and of the same size."""
    address = x[X_ADDRESS]
    flags = ep.u64(SECOND_ATOMIC | FIRST_ATOMIC | SECOND_WRITES) if writes else ep.u64(SECOND_ATOMIC | FIRST_ATOMIC)
    previous = location + (A_USERS - U_NEXT)
    user = at(location, A_USERS)
    while ep.u64(user) != 0:
        after = user[U_NEXT]
        tid = user[U_TID]
        keep = True
        if tid != x[X_TID]:
            wrote, read = user[U_WRITE_EPOCH], user[U_READ_EPOCH]
            wrote_before = wrote == 0 or ordered(x, (tid << 40) | wrote)
            read_before = read == 0 or ordered(x, (tid << 40) | read)
            if not wrote_before:
                if user[U_SIZE] != size:
                    report(k, x, FOUND_MIXED_SIZE, (tid << 40) | wrote, user[U_WRITE_INFO], info, address, size, flags | FIRST_WRITES)
                elif not inclusive(x, scope, user[U_WRITE_SCOPE], user[U_RANK], user[U_BLOCK]):
                    report(k, x, FOUND_SCOPE_RACE, (tid << 40) | wrote, user[U_WRITE_INFO], info, address, size, flags | FIRST_WRITES)
                elif writes and not reads and read == wrote:
                    # No race, but what the update left is lost: it explains a race of what the word's value leads to.
                    report(k, x, FOUND_OVERWRITE, (tid << 40) | wrote, user[U_WRITE_INFO], info, address, size, flags | FIRST_WRITES)
            if writes:
                if not read_before:
                    if user[U_SIZE] != size:
                        report(k, x, FOUND_MIXED_SIZE, (tid << 40) | read, user[U_READ_INFO], info, address, size, flags)
                    elif not inclusive(x, scope, user[U_READ_SCOPE], user[U_RANK], user[U_BLOCK]):
                        report(k, x, FOUND_SCOPE_RACE, (tid << 40) | read, user[U_READ_INFO], info, address, size, flags)
                elif wrote_before:
                    # Who is ordered with this write is ordered with what came before it.
                    keep = False
        if keep:
            previous = user
        else:
            previous[U_NEXT] = after
        user = pointer(after)
    mine = user_of(k, x, location)
    mine[U_SIZE] = size
    if reads:
        mine[U_READ_EPOCH] = x[X_EPOCH]
        mine[U_READ_INFO] = place(x, info)
        mine[U_READ_SCOPE] = scope
    if writes:
        mine[U_WRITE_EPOCH] = x[X_EPOCH]
        mine[U_WRITE_INFO] = place(x, info)
        mine[U_WRITE_SCOPE] = scope
    return mine


@ep.func
def latest_store(location: Words):
    return at(location, A_RING + location[A_LATEST] % RING)


@ep.func
def observes(x: Words, store: Words, scope: ep.u64):
    """Whether reading the store is a strong read of a strong write, so that what the store carries may be acquired."""
    result = store[W_ATOMIC] != 0
    if result and store[W_WRITER] >> 40 != x[X_TID]:
        result = inclusive(x, scope, store[W_SCOPE], store[W_RANK], store[W_BLOCK])
    return result


@ep.func
def note_read(k: Words, x: Words, store: Words):
    """For weak memory: who has read a store, so that nobody after them reads an older one."""
    if k[K_WEAK] != 0:
        node = at(store, W_READERS)
        while ep.u64(node) != 0 and node[1] >> 40 != x[X_TID]:
            node = at(node, 0)
        if ep.u64(node) == 0:
            node = alloc(k, 2)
            node[0] = store[W_READERS]
            node[1] = now(x)
            store[W_READERS] = ep.u64(node)


@ep.func
def must_see(x: Words, store: Words):
    """Whether the thread may read no store older than this one."""
    writer = store[W_WRITER]
    result = writer == 0 or ordered(x, writer)
    node = at(store, W_READERS)
    while not result and ep.u64(node) != 0:
        result = ordered(x, node[1])
        node = at(node, 0)
    return result


@ep.func
def random_bits(k: Words):
    word = k[K_RANDOM]
    word = word ^ (word << 13)
    word = word ^ (word >> 7)
    word = word ^ (word << 17)
    k[K_RANDOM] = word
    return word >> 20


@ep.func
def chosen_store(k: Words, x: Words, location: Words):
    """The store a load reads: the latest, or with the weak probability an older one that the model allows."""
    number = location[A_LATEST]
    if k[K_WEAK] != 0 and number > location[A_FLOOR]:
        if random_bits(k) & 0xFFFF < k[K_WEAK] and not (x[X_STALE_ADDRESS] == x[X_ADDRESS] and x[X_STALE_COUNT] >= MOST_STALE):
            lowest = number
            oldest = location[A_FLOOR]
            if number >= RING and oldest + RING <= number:
                oldest = number - (RING - 1)
            while lowest > oldest and not must_see(x, at(location, A_RING + lowest % RING)):
                lowest -= 1
            if lowest < number:
                if x[X_STALE_ADDRESS] != x[X_ADDRESS]:
                    x[X_STALE_ADDRESS] = x[X_ADDRESS]
                    x[X_STALE_COUNT] = 0
                x[X_STALE_COUNT] = x[X_STALE_COUNT] + 1
                number = lowest + random_bits(k) % (number - lowest)
    if number == location[A_LATEST] and x[X_STALE_ADDRESS] == x[X_ADDRESS]:
        x[X_STALE_COUNT] = 0
    return at(location, A_RING + number % RING)


@ep.func
def ahead(k: Words, x: Words, store: Words):
    """Whether another rank's launch of the same kernel made the store, no earlier in its stream than the thread's launch is in its own."""
    here = at(x, X_LAUNCH)
    there = pointer(at(k, K_LAUNCHES)[store[W_INFO] >> 32])
    return there[C_SITES] == here[C_SITES] and there[C_RANK] != here[C_RANK] and there[C_ORDINAL] >= here[C_ORDINAL]


@ep.func
def settle(k: Words, x: Words):
    """The wait looked at last was satisfied. It is by mistake when the word holds the same value since an earlier launch's wait there.

    Not so where a peer's launch of this kernel of the same number, or of a later one, stored it: that peer was ahead.
    """
    if x[X_WAIT_OBJECT] != 0:
        store = at(x, X_WAIT_STORE)
        location = at(x, X_WAIT_LOCATION)
        site = x[X_WAIT_SITE]
        block = block_of(x)
        block[B_WAITED] = now(x)
        block[B_WAITED_INFO] = (x[X_SEQUENCE] << 32) | site
        block[B_WAITED_WRITER] = store[W_WRITER]
        block[B_WAITED_STORE] = store[W_INFO]
        taken = location[A_TAKEN]
        number = store[W_NUMBER]
        if taken & LOW == site and taken >> 32 < x[X_SEQUENCE] and taken != 0 and store[W_INFO] >> 32 != 0 and not ahead(k, x, store):
            first = location[A_TAKEN_NUMBER]
            same = number >= first and number - first < RING
            if same:
                for i in range(first, number):
                    other = at(location, A_RING + i % RING)
                    later = at(location, A_RING + (i + 1) % RING)
                    if other[W_ATOMIC] == 0 or later[W_ATOMIC] == 0 or other[W_VALUE] != later[W_VALUE]:
                        same = False
            if same:
                info = (site - x[X_SITES]) << INFO_SITE
                report(k, x, FOUND_STALE_LAUNCH, store[W_WRITER], store[W_INFO], info, x[X_WAIT_OBJECT], 0, FIRST_ATOMIC | SECOND_ATOMIC)
        if taken & LOW != site or taken >> 32 != x[X_SEQUENCE]:
            location[A_TAKEN] = (x[X_SEQUENCE] << 32) | site
            location[A_TAKEN_NUMBER] = number
        x[X_WAIT_OBJECT] = 0


@ep.func
def probe(k: Words, x: Words, info: ep.u64, writes: ep.i1):
    """Checks an atomic access against plain ones. Leaves the location and the address to use."""
    size = (info >> INFO_SIZE) & 0xFF
    kind = ep.u64(KIND_ATOMIC_STORE) if writes else ep.u64(KIND_ATOMIC_LOAD)
    keep_info, keep_value = x[2], x[3]
    x[2] = (info & ~ep.u64(0xFF)) | kind
    x[3] = size
    host_call(k[K_ACCESS], x[X_SELF], 0)
    x[2] = keep_info
    x[3] = keep_value


@ep.func
def word_at(address: ep.u64, size: ep.u64):
    found = ep.u64(0)
    if size == 8:
        found = pointer(address)[0]
    else:
        found = ep.u64(pointer(address).cast(ep.u32)[0])
    return found


@ep.func
def atomic(k: Words, x: Words, info: ep.u64, value: ep.u64, reads: ep.i1, writes: ep.i1):
    """An atomic load, store or read-modify-write that happens now; `value` is what it stores."""
    order, scope, dropped = effective(k, x, info)
    if dropped:
        order = ep.u64(1)
    if order == ORDER_SEQ_CST:
        sequential(k, x, scope, info)
    probe(k, x, info, writes)
    size = (info >> INFO_SIZE) & 0xFF
    location = at(x, X_LOCATION)
    if ep.u64(location) == 0:
        if reads and not writes and x[X_RESULT] != 0:
            x[X_RESULT] = word_at(x[X_RESULT], size)
    else:
        mine = check_strong(k, x, location, reads, writes, scope, size, info)
        inherited = ep.u64(0)
        old = latest_store(location)
        if reads:
            if not writes:
                old = chosen_store(k, x, location)
                if old[W_NUMBER] == location[A_LATEST]:
                    x[X_RESULT] = word_at(x[X_ADDRESS], size)
                else:
                    x[X_RESULT] = old[W_VALUE]
            note_read(k, x, old)
            mine[U_READ_NUMBER] = old[W_NUMBER] + 1
            if observes(x, old, scope):
                silent = k[K_MODEL] == MODEL_PTX and (info >> INFO_FLAGS) & FLAG_NO_RESULT != 0
                if not silent:
                    if acquires(order):
                        acquire(k, x, old[W_MESSAGES], scope, info)
                    remember(k, x, old[W_MESSAGES], info)
                if writes:
                    inherited = old[W_MESSAGES]
        elif k[K_MODEL] == MODEL_PTX and old[W_WRITER] >> 40 == x[X_TID]:
            # PTX: a release of this thread at this location, then a strong write there, is a release pattern too.
            inherited = old[W_MESSAGES]
        if (info >> INFO_FLAGS) & FLAG_WAIT != 0:
            x[X_WAIT_OBJECT] = x[X_ADDRESS]
            x[X_WAIT_STORE] = ep.u64(old)
            x[X_WAIT_LOCATION] = ep.u64(location)
            x[X_WAIT_SITE] = x[X_SITES] + (info >> INFO_SITE)
        if writes:
            made = alloc(k, STORE_WORDS)
            number = location[A_LATEST] + 1
            location[A_LATEST] = number
            mine[U_WRITE_NUMBER] = number
            if not reads:
                location[A_CHAIN] = number
            made[W_NUMBER] = number
            made[W_VALUE] = value if size == 8 else value & LOW
            made[W_WRITER] = now(x)
            made[W_INFO] = place(x, info)
            made[W_SCOPE] = scope
            made[W_RANK] = x[X_RANK]
            made[W_BLOCK] = x[X_BLOCK]
            made[W_ATOMIC] = 1
            made[W_MESSAGES] = publish(k, x, inherited, order, scope, info)
            location[A_RING + number % RING] = ep.u64(made)
            # A new epoch, so that what the thread does next is not taken for what this store published.
            tick(x)
