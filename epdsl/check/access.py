"""Plain accesses: allocated, written before read, and ordered with what others did at the same bytes."""

from __future__ import annotations

import epdsl as ep

from .layout import (
    A_ADDRESS,
    A_CHAIN,
    A_FLOOR,
    A_LATEST,
    A_RING,
    A_SIZE,
    A_USERS,
    C_ASYNC,
    C_CLOCK,
    CELL_MORE,
    CELL_READ,
    CELL_READ_INFO,
    CELL_READ_LANES,
    CELL_STATE,
    CELL_SYNC,
    CELL_WORDS,
    CELL_WRITE,
    CELL_WRITE_INFO,
    ENGINE,
    FIRST_ATOMIC,
    FIRST_WRITES,
    FLAG_GLOBAL,
    FOUND_BOUNDS,
    FOUND_FREED,
    FOUND_OVERFLOW,
    FOUND_PROXY,
    FOUND_RACE,
    FOUND_UNINITIALISED,
    INFO_FLAGS,
    INFO_SITE,
    K_EXEMPT,
    K_EXEMPT_COUNT,
    K_FREE_NODES,
    K_FULL,
    K_LANES,
    K_LIMIT,
    K_MODEL,
    K_PROXIES,
    K_SCRATCH,
    K_STEPS,
    KIND_ALLOCATE,
    KIND_ATOMIC_LOAD,
    KIND_ATOMIC_STORE,
    KIND_FREE,
    KIND_LOAD,
    KIND_STORE,
    LOAD_READS,
    LOAD_WRITES,
    LOCATION_WORDS,
    MODEL_PTX,
    R_INFO,
    R_LANES,
    R_NEXT,
    R_READ,
    READER_WORDS,
    RING,
    SECOND_ATOMIC,
    SECOND_WRITES,
    STATE_ALLOCATED,
    STATE_FREED,
    STATE_SPLIT,
    STATE_WRITTEN,
    STORE_READS,
    STORE_WORDS,
    STORE_WRITES,
    U_NEXT,
    U_READ_EPOCH,
    U_READ_INFO,
    U_READ_NUMBER,
    U_TID,
    U_WRITE_EPOCH,
    U_WRITE_INFO,
    U_WRITE_NUMBER,
    W_BLOCK,
    W_INFO,
    W_NUMBER,
    W_RANK,
    W_VALUE,
    W_WRITER,
    X_BLOCK,
    X_CLOCK,
    X_COLUMN,
    X_ENGINE,
    X_EPOCH,
    X_LANE,
    X_LAUNCH,
    X_LOCATION,
    X_OVERFLOW,
    X_PROXIES,
    X_RANK,
    X_RESULT,
    X_SEQUENCE,
    X_TID,
)
from .words import EPOCH_MASK, Words, alloc, at, is_async, now, ordered, page_of, place, pointer, report, seen


@ep.func
def open_lane(k: Words, x: Words, read: ep.u64, lanes: ep.u64):
    """One more than the first lane of a reading warp whose read does not happen before now; 0 when there is none."""
    column, epoch = read >> 48, read & EPOCH_MASK
    clock = at(x, X_CLOCK)
    result = ep.u64(0)
    level = ep.u64(0)
    vector = ep.u64(0)
    if column < clock[0]:
        level = clock[2 + column * 2]
        vector = clock[3 + column * 2]
    if level < epoch:
        own = x[X_TID]
        for i in range(0, k[K_LANES]):
            if (lanes >> i) & 1 and ((column << 8) | i) != own:
                known = ep.u64(0)
                if vector != 0:
                    known = pointer(vector)[i]
                if known < epoch:
                    result = i + 1
                    break
    return result


@ep.func
def drop_readers(k: Words, cell: Words):
    """Gives the list of further readers back."""
    if cell[CELL_MORE] != 0:
        last = at(cell, CELL_MORE)
        while last[R_NEXT] != 0:
            last = at(last, R_NEXT)
        last[R_NEXT] = k[K_FREE_NODES]
        k[K_FREE_NODES] = cell[CELL_MORE]
        cell[CELL_MORE] = 0


@ep.func
def note_reader(k: Words, x: Words, cell: Words, me: ep.u64, info: ep.u64):
    """Remembers a read: lanes of a warp that read in the same epoch share an entry, reads that happened before are forgotten."""
    read = (me >> 48 << 48) | (me & EPOCH_MASK)
    bit = ep.u64(1) << ((me >> 40) & 0xFF)
    if cell[CELL_READ_LANES] != 0 and cell[CELL_READ] == read:
        cell[CELL_READ_LANES] = cell[CELL_READ_LANES] | bit
    elif cell[CELL_READ_LANES] == 0 or open_lane(k, x, cell[CELL_READ], cell[CELL_READ_LANES]) == 0:
        cell[CELL_READ] = read
        cell[CELL_READ_LANES] = bit
        cell[CELL_READ_INFO] = info
    else:
        previous = cell + (CELL_MORE - R_NEXT)
        node = at(cell, CELL_MORE)
        found = False
        while ep.u64(node) != 0:
            after = node[R_NEXT]
            if node[R_READ] == read:
                node[R_LANES] = node[R_LANES] | bit
                found = True
                break
            if open_lane(k, x, node[R_READ], node[R_LANES]) == 0:
                previous[R_NEXT] = after
                node[R_NEXT] = k[K_FREE_NODES]
                k[K_FREE_NODES] = ep.u64(node)
            else:
                previous = node
            node = pointer(after)
        if not found:
            fresh = at(k, K_FREE_NODES)
            if ep.u64(fresh) == 0:
                fresh = alloc(k, READER_WORDS)
            else:
                k[K_FREE_NODES] = fresh[R_NEXT]
            fresh[R_NEXT] = cell[CELL_MORE]
            fresh[R_READ] = read
            fresh[R_LANES] = bit
            fresh[R_INFO] = info
            cell[CELL_MORE] = ep.u64(fresh)


@ep.func
def observed_by(k: Words, x: Words, location: Words):
    """PTX: a store is also before what comes after a strong read of it, or of a read-modify-write in the chain it began.

    One more than the number of the latest store that was read so; LLVM's model has no such rule.
    """
    result = ep.u64(0)
    if k[K_MODEL] == MODEL_PTX:
        user = at(location, A_USERS)
        while ep.u64(user) != 0:
            if user[U_READ_NUMBER] > result and ordered(x, (user[U_TID] << 40) | user[U_READ_EPOCH]):
                result = user[U_READ_NUMBER]
            user = at(user, U_NEXT)
    return result


@ep.func
def check_users(k: Words, x: Words, location: Words, write: ep.i1, info: ep.u64, address: ep.u64, size: ep.u64, flags: ep.u64):
    """A plain access to a word that is also used atomically: those uses must happen before it."""
    observed = observed_by(k, x, location)
    user = at(location, A_USERS)
    while ep.u64(user) != 0:
        tid = user[U_TID]
        if tid != x[X_TID]:
            number = user[U_WRITE_NUMBER]
            chained = number < observed and number >= location[A_CHAIN]
            if user[U_WRITE_EPOCH] != 0:
                packed = (tid << 40) | user[U_WRITE_EPOCH]
                if not ordered(x, packed) and not chained:
                    report(k, x, FOUND_RACE, packed, user[U_WRITE_INFO], info, address, size, flags | (FIRST_ATOMIC | FIRST_WRITES))
            if write and user[U_READ_EPOCH] != 0 and not (chained and user[U_READ_EPOCH] == user[U_WRITE_EPOCH]):
                packed = (tid << 40) | user[U_READ_EPOCH]
                if not ordered(x, packed):
                    report(k, x, FOUND_RACE, packed, user[U_READ_INFO], info, address, size, flags | FIRST_ATOMIC)
        user = at(user, U_NEXT)


@ep.func
def plain_store(k: Words, x: Words, location: Words, info: ep.u64):
    """A plain write to a word that is also used atomically: nobody may read an older value from now on, nor acquires anything."""
    made = alloc(k, STORE_WORDS)
    number = location[A_LATEST] + 1
    location[A_LATEST] = number
    location[A_FLOOR] = number
    location[A_USERS] = 0
    made[W_NUMBER] = number
    made[W_WRITER] = now(x)
    made[W_INFO] = place(x, info)
    made[W_RANK] = x[X_RANK]
    made[W_BLOCK] = x[X_BLOCK]
    location[A_RING + number % RING] = ep.u64(made)


@ep.func
def location_of(k: Words, cell: Words, address: ep.u64, size: ep.u64):
    """The atomic location a cell belongs to, made on first use with what the word holds as its oldest store."""
    found = at(cell, CELL_SYNC)
    if ep.u64(found) == 0:
        found = alloc(k, LOCATION_WORDS)
        found[A_ADDRESS] = address
        found[A_SIZE] = size
        store = alloc(k, STORE_WORDS)
        word = pointer(address)
        store[W_VALUE] = word[0] if size == 8 else ep.u64(word.cast(ep.u32)[0])
        store[W_WRITER] = cell[CELL_WRITE]
        store[W_INFO] = cell[CELL_WRITE_INFO]
        found[A_RING] = ep.u64(store)
        cell[CELL_SYNC] = ep.u64(found)
    return found


@ep.func
def split(k: Words, cell: Words):
    """Gives each byte of the cell a cell of its own."""
    four = alloc(k, 4 * CELL_WORDS)
    for b in range(4):
        byte = four + b * CELL_WORDS
        for i in range(CELL_WORDS):
            byte[i] = cell[i]
        byte[CELL_MORE] = 0
        node = at(cell, CELL_MORE)
        while ep.u64(node) != 0:
            copy = alloc(k, READER_WORDS)
            copy[R_NEXT] = byte[CELL_MORE]
            copy[R_READ] = node[R_READ]
            copy[R_LANES] = node[R_LANES]
            copy[R_INFO] = node[R_INFO]
            byte[CELL_MORE] = ep.u64(copy)
            node = at(node, R_NEXT)
    cell[CELL_STATE] = cell[CELL_STATE] | STATE_SPLIT
    cell[CELL_MORE] = ep.u64(four)


@ep.func
def exempt(k: Words, address: ep.u64):
    """Whether the address belongs to the runtime itself."""
    table = at(k, K_EXEMPT)
    result = False
    for i in range(0, k[K_EXEMPT_COUNT]):
        if address >= table[2 * i] and address < table[2 * i + 1]:
            result = True
            break
    return result


@ep.func
def fenced(k: Words, x: Words, w: ep.u64, space: ep.u64):
    """Whether the copy engine may use memory after an access: its own, one from before the launch, or one with a proxy fence after it.

    The fence is that of the accessing thread, and came here; or that of this thread, after it knew of the access.
    w       whose access, as in CELL_WRITE
    space   of the memory: 0 shared, 1 global
    """
    result = True
    if k[K_MODEL] == MODEL_PTX and w != 0:
        column, lane, epoch = w >> 48, (w >> 40) & 0xFF, w & EPOCH_MASK
        # A list, the latest first: it may have fenced again meanwhile.
        fence = at(at(k, K_PROXIES), (column * 64 + lane) * 2 + space)
        if ep.u64(fence) != ENGINE and seen(at(at(x, X_LAUNCH), C_CLOCK), column, lane) < epoch:
            known = x[X_EPOCH] if w >> 40 == x[X_TID] else seen(at(x, X_CLOCK), column, lane)
            while ep.u64(fence) != 0 and fence[1] > known:
                fence = at(fence, 0)
            result = ep.u64(fence) != 0 and fence[1] >= epoch
            if not result and x[X_PROXIES + space] != 0:
                result = seen(at(x, X_PROXIES + space), column, lane) >= epoch
    return result


@ep.func
def space_of(info: ep.u64):
    """The memory that one side of a bulk copy uses: 0 shared, 1 global."""
    return (info >> INFO_FLAGS) // FLAG_GLOBAL & 1


@ep.func
def check_readers(k: Words, x: Words, cell: Words, racing: ep.i1, info: ep.u64, address: ep.u64, size: ep.u64, flags: ep.u64):
    """A write: every read must happen before it (`racing`), and one by the copy engine needs a proxy fence after the reads."""
    if cell[CELL_READ_LANES] != 0:
        read = cell[CELL_READ]
        lanes = cell[CELL_READ_LANES]
        where = cell[CELL_READ_INFO]
        node = at(cell, CELL_MORE)
        more = True
        while more:
            if racing:
                lane = open_lane(k, x, read, lanes)
                if lane != 0:
                    report(k, x, FOUND_RACE, read | ((lane - 1) << 40), where, info, address, size, flags)
            if is_async(info):
                for i in range(0, k[K_LANES]):
                    if (lanes >> i) & 1 and not fenced(k, x, read | (ep.u64(i) << 40), space_of(info)):
                        report(k, x, FOUND_PROXY, read | (ep.u64(i) << 40), where, info, address, size, flags)
                        break
            more = ep.u64(node) != 0
            if more:
                read = node[R_READ]
                lanes = node[R_LANES]
                where = node[R_INFO]
                node = at(node, R_NEXT)


@ep.func
def touch(k: Words, x: Words, cell: Words, kind: ep.u64, me: ep.u64, info: ep.u64, address: ep.u64, size: ep.u64):
    """One access to one cell. Returns 1 when the memory may not be used."""
    state = cell[CELL_STATE]
    bad = ep.u64(0)
    if kind == KIND_ALLOCATE or kind == KIND_FREE:
        for i in range(CELL_WORDS):
            if i != CELL_MORE or state & STATE_SPLIT == 0:
                cell[i] = 0
        cell[CELL_STATE] = ep.u64(STATE_ALLOCATED) if kind == KIND_ALLOCATE else ep.u64(STATE_FREED)
    elif state & STATE_ALLOCATED == 0:
        if not exempt(k, address):
            bad = ep.u64(1)
            if state & STATE_FREED != 0:
                report(k, x, FOUND_FREED, 0, 0, info, address, size, kind & 1)
            else:
                report(k, x, FOUND_BOUNDS, 0, 0, info, address, size, kind & 1)
    else:
        write = kind == KIND_STORE or kind == KIND_ATOMIC_STORE
        plain = kind == KIND_LOAD or kind == KIND_STORE
        flags = (ep.u64(SECOND_WRITES) if write else ep.u64(0)) | (ep.u64(0) if plain else ep.u64(SECOND_ATOMIC))
        w = cell[CELL_WRITE]
        if w != me and w != 0 and not ordered(x, w):
            report(k, x, FOUND_RACE, w, cell[CELL_WRITE_INFO], info, address, size, flags | FIRST_WRITES)
        if is_async(info) and not fenced(k, x, w, space_of(info)):
            report(k, x, FOUND_PROXY, w, cell[CELL_WRITE_INFO], info, address, size, flags | FIRST_WRITES)
        if write and (w != me or is_async(info)):
            check_readers(k, x, cell, w != me, info, address, size, flags)
        if plain and cell[CELL_SYNC] != 0:
            location = at(cell, CELL_SYNC)
            check_users(k, x, location, write, info, address, size, flags)
            if write and address == location[A_ADDRESS]:
                plain_store(k, x, location, info)
        if write:
            if plain:
                cell[CELL_WRITE] = me
                cell[CELL_WRITE_INFO] = place(x, info)
            cell[CELL_READ_LANES] = 0
            drop_readers(k, cell)
            cell[CELL_STATE] = state | STATE_WRITTEN
        else:
            if state & STATE_WRITTEN == 0:
                report(k, x, FOUND_UNINITIALISED, 0, 0, info, address, size, 0)
                cell[CELL_STATE] = state | STATE_WRITTEN
            if plain:
                note_reader(k, x, cell, me, place(x, info))
    return bad


@ep.kernel
def access(x: Words, address: ep.u64, info: ep.u64, nbytes: ep.u64):
    """One access of one thread to `nbytes` bytes. The thread's result is the address to use: memory of the engine's own where it is bad, 0
    where the run has used up its events and the thread is to end.

    An atomic access (KIND_ATOMIC_LOAD, KIND_ATOMIC_STORE) is checked against plain ones only, and its location is left in X_LOCATION.
    """
    k = at(x, X_ENGINE)
    x[X_RESULT] = address
    x[X_LOCATION] = 0
    if k[K_FULL] == 0:
        k[K_STEPS] = k[K_STEPS] + 1
        kind = info & 0xFF
        me = now(x)
        if is_async(info):
            outside = (info >> INFO_FLAGS) & FLAG_GLOBAL != 0
            part = ep.u64(STORE_READS)
            if kind == KIND_LOAD and outside:
                part = ep.u64(LOAD_READS)
            elif kind != KIND_LOAD:
                part = ep.u64(STORE_WRITES) if outside else ep.u64(LOAD_WRITES)
            column = x[X_COLUMN] + at(x, X_LAUNCH)[C_ASYNC] * part
            me = (column << 48) | (x[X_LANE] << 40) | (me & EPOCH_MASK)
        if x[X_OVERFLOW] != 0:
            site = x[X_OVERFLOW] - 1
            x[X_OVERFLOW] = 0
            report(k, x, FOUND_OVERFLOW, 0, 0, site << INFO_SITE, address, nbytes, kind & 1)
        end = address + nbytes
        here = address
        while here < end:
            page = page_of(k, here >> 12, 0)
            if page == 0 and kind == KIND_ALLOCATE:
                page = page_of(k, here >> 12, 1)
            if page == 0:
                if not exempt(k, here):
                    report(k, x, FOUND_BOUNDS, 0, 0, info, here, nbytes, kind & 1)
                    x[X_RESULT] = k[K_SCRATCH]
                break
            count = ep.min(4 - (here & 3), end - here)
            cell = pointer(page) + ((here & 0xFFF) >> 2) * CELL_WORDS
            if count != 4 and cell[CELL_STATE] & STATE_SPLIT == 0:
                split(k, cell)
            cells = ep.u64(1)
            if cell[CELL_STATE] & STATE_SPLIT != 0:
                cell = at(cell, CELL_MORE) + (here & 3) * CELL_WORDS
                cells = count
            for i in range(0, cells):
                each = cell + i * CELL_WORDS
                if touch(k, x, each, kind, me, info, here + i, nbytes) != 0:
                    x[X_RESULT] = k[K_SCRATCH]
                elif kind >= KIND_ATOMIC_LOAD:
                    if x[X_LOCATION] == 0:
                        x[X_LOCATION] = ep.u64(location_of(k, each, address, nbytes))
                    elif each[CELL_SYNC] == 0:
                        each[CELL_SYNC] = x[X_LOCATION]
            here = here + count
        if k[K_STEPS] > k[K_LIMIT] and x[X_SEQUENCE] != 0:
            # Ends the thread: a loop without an end would keep the host thread for good.
            x[X_RESULT] = 0
