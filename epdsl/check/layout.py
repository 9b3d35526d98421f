"""Memory layout of the checker's engine. All fields are 64-bit words; kernels, the engine and Python share them.

A thread is a lane of a *column*: a warp of one block of one stream. Launches of a stream follow each other, so they share columns.
A *clock* gives for every column the epoch up to which each lane's operations have happened before: [columns, 0, then two words a column:
level, lanes]. `lanes` is 0 or a vector of one epoch a lane; a lane's epoch is the larger of the two. Vectors are never changed once made.
"""

from __future__ import annotations

# ---- the engine

(
    K_ACCESS,
    K_SYNC,
    K_JOIN,
    K_NEXT,
    K_END,
    K_FULL,
    K_COLUMNS,
    K_LANES,
    K_PAGES,
    K_PAGE_MASK,
    K_LAST_NUMBER,
    K_LAST_PAGE,
    K_FINDINGS,
    K_FOUND,
    K_FINDING_CAPACITY,
    K_MODEL,
    K_FLAGS,
    K_WEAK,
    K_RANDOM,
    K_OVERRIDES,
    K_FORGIVEN,
    K_SCRATCH,
    K_SC,
    K_STEPS,
    K_FREE_NODES,
    K_EXEMPT,
    K_EXEMPT_COUNT,
    K_PROXIES,
    K_WATCH,
    K_WATCH_EPOCH,
    K_TRACE,
    K_TRACED,
    K_WAITS,
    K_HASH,
    K_LAUNCHES,
    K_INSPECT,
    K_LIMIT,
) = range(37)
K_P0 = 40  # parameters of the next call between the engine's functions: four words
K_P1, K_P2, K_P3 = K_P0 + 1, K_P0 + 2, K_P0 + 3
K_HOST = 48  # where a host operation's thread words are
ENGINE_WORDS = 64

MODEL_PTX, MODEL_AMDGPU = range(2)

# Which rules are relaxed for every site, to learn what is missing (K_FLAGS).
RELAX_SCOPE = 1
RELAX_ORDER = 2

# ---- a thread. The first four words are the parameters of the engine's functions.

(
    X_SELF,
    X_ADDRESS,
    X_INFO,
    X_VALUE,
    X_RESULT,
    X_OLD,
    X_ACCESS,
    X_SYNC,
    X_ENGINE,
    X_LAUNCH,
    X_THREAD,
    X_COLUMN,
    X_LANE,
    X_EPOCH,
    X_CLOCK,
    X_OWNED,
    X_RANK,
    X_BLOCK,
    X_TID,
    X_SITES,
    X_SEQUENCE,
    X_PENDING,
    X_PENDING_COUNT,
    X_WAIT_OBJECT,
    X_WAIT_STORE,
    X_WAIT_SITE,
    X_WAIT_LOCATION,
    X_OVERFLOW,
    X_SLOT,
    X_BARRIER,
    X_BULK,
    X_ENDED,
    X_LOCATION,
    X_INDEX,
) = range(34)
X_RELEASE = 34  # three release fences, by scope: clock, epoch
X_STALE_ADDRESS = 40
X_STALE_COUNT = 41
X_COMMITTED = 42  # epochs of the latest groups of bulk copies
BULK_GROUPS = 54
X_PROXIES = X_COMMITTED + BULK_GROUPS  # by space, shared and global: the clock at the latest proxy fence
X_COMPARED = X_PROXIES + 2  # what the wait compares with, and whether it is one number
X_COMPARES = X_COMPARED + 1
THREAD_WORDS = X_COMPARED + 2

# ---- the copy engine: what it does for a thread is done by columns of its own, so many ranges of columns behind the thread's

LOAD_READS, LOAD_WRITES, STORE_READS, STORE_WRITES = range(1, 5)
ENGINE = 1  # in K_PROXIES, where a thread's column has the list of its proxy fences

# ---- a barrier of the copy engine (mbarrier): what has arrived in this phase, what the latest phases of each parity published, and who
# made it where (as CELL_WRITE and CELL_WRITE_INFO)

(Q_CLOCK, Q_OWNED, Q_DONE, _, Q_MADE, Q_MADE_INFO) = range(6)
PHASE_WORDS = 6

# X_INFO: kind 0-7, size 8-15, order 16-23, scope 24-31, flags 32-39, site 40-63
INFO_SIZE, INFO_ORDER, INFO_SCOPE, INFO_FLAGS, INFO_SITE = 8, 16, 24, 32, 40
FLAG_WAIT = 1  # the load of a wait: what follows tells whether it was satisfied
FLAG_NO_RESULT = 2  # a read-modify-write whose old value nobody reads
FLAG_CHANGED = 4  # a compare-and-swap that stored
FLAG_ASYNC = 8  # an access by the copy engine
FLAG_GLOBAL = 16  # of the copy engine's: to memory outside the block
FLAG_ARRIVE = 32  # a thread that comes to a named barrier and does not wait there

(KIND_LOAD, KIND_STORE, KIND_ALLOCATE, KIND_FREE, KIND_WRITTEN) = range(5)
(
    KIND_ATOMIC_LOAD,
    KIND_ATOMIC_STORE,
    KIND_RMW,
    KIND_CAS,
    KIND_FENCE,
    KIND_PROBE,
    KIND_START,
    KIND_EXIT,
    KIND_BARRIER_ARRIVE,
    KIND_BARRIER_LEAVE,
    KIND_NAMED_ARRIVE,
    KIND_NAMED_LEAVE,
    KIND_WARP_ARRIVE,
    KIND_WARP_LEAVE,
    KIND_FINISH,
    KIND_BULK_LOAD,
    KIND_BULK_STORE,
    KIND_BULK_COMMIT,
    KIND_BULK_WAIT,
    KIND_PROXY_FENCE,
    KIND_PHASE,
    KIND_PHASE_TEST,
    KIND_PHASE_MAKE,
    KIND_SETTLE,
) = range(16, 40)

ORDER_PLAIN, ORDER_RELAXED, ORDER_ACQUIRE, ORDER_RELEASE, ORDER_ACQ_REL, ORDER_SEQ_CST = range(6)
SCOPE_NONE, SCOPE_BLOCK, SCOPE_DEVICE, SCOPE_SYSTEM = range(4)

# ---- overrides of one site, by global site number

OVERRIDE_ORDER = 1  # bits 8-15 hold the order
OVERRIDE_SCOPE = 2  # bits 16-23 hold the scope
OVERRIDE_DROP = 4  # the operation orders nothing

# ---- a launch

(
    C_ENGINE,
    C_CLOCK,
    C_OWNED,
    C_COLUMN,
    C_RANK,
    C_SEQUENCE,
    C_SITES,
    C_BLOCKS,
    C_END,
    C_END_OWNED,
    C_SHARED,
    C_WARPS,
    C_MODEL,
    C_ASYNC,
    C_ORDINAL,
) = range(15)
LAUNCH_WORDS = 16

# ---- a block

N_MEETING = 16
MEETING_WORDS = 16
(M_CLOCK, M_OWNED, M_EPOCH, M_COUNT, M_GENERATION, M_WANTED, M_SITE, M_WARPS) = range(8)
M_DONE = 8  # four (clock, epoch) of the latest generations
BLOCK_MEETINGS = 8
BLOCK_WARPS = BLOCK_MEETINGS + N_MEETING * MEETING_WORDS
WARP_SLOTS = 4
(S_MASK, S_CLOCK, S_OWNED, S_EPOCH, S_STATE, S_LEFT) = range(6)
STATE_FREE, STATE_MEETING, STATE_LEAVING = range(3)
SLOT_WORDS = 8
MAX_WARPS = 32
BLOCK_WORDS = BLOCK_WARPS + MAX_WARPS * WARP_SLOTS * SLOT_WORDS
B_EXITED, B_EXITED_WARPS = range(2)
# The latest wait that was satisfied: its thread and place, and who stored what it saw at which place.
B_WAITED, B_WAITED_INFO, B_WAITED_WRITER, B_WAITED_STORE = range(2, 6)

# ---- shadow memory: one cell for each 4 bytes, or for each byte of them once it was accessed by bytes

CELL_WORDS = 8
PAGE_BYTES = 4096
PAGE_WORDS = PAGE_BYTES // 4 * CELL_WORDS
(
    CELL_STATE,
    CELL_WRITE,
    CELL_WRITE_INFO,
    CELL_READ,
    CELL_READ_LANES,
    CELL_READ_INFO,
    CELL_MORE,
    CELL_SYNC,
) = range(8)
STATE_ALLOCATED, STATE_WRITTEN, STATE_FREED, STATE_SPLIT = 1, 2, 4, 8

# CELL_WRITE: column << 48 | lane << 40 | epoch. CELL_READ: column << 48 | epoch, with a bit a lane in CELL_READ_LANES.
# CELL_WRITE_INFO, CELL_READ_INFO: launch << 32 | site.

# More readers of a cell: a list.
(R_NEXT, R_READ, R_LANES, R_INFO) = range(4)
READER_WORDS = 4

# ---- an atomic location

(A_ADDRESS, A_SIZE, A_USERS, A_LATEST, A_FLOOR, A_RING) = range(6)
RING = 8
# The store that satisfied a wait last: launch << 32 | site of the wait, and the store's number.
A_TAKEN, A_TAKEN_NUMBER = A_RING + RING, A_RING + RING + 1
# The latest store that was no read-modify-write: from there on each store read the one before.
A_CHAIN = A_RING + RING + 2
LOCATION_WORDS = A_RING + RING + 4

# Who has used it: a list, one a thread.
(
    U_NEXT,
    U_TID,
    U_READ_EPOCH,
    U_READ_INFO,
    U_READ_SCOPE,
    U_WRITE_EPOCH,
    U_WRITE_INFO,
    U_WRITE_SCOPE,
    U_RANK,
    U_BLOCK,
    U_SIZE,
    U_READ_NUMBER,
    U_WRITE_NUMBER,
) = range(13)
USER_WORDS = 14

# A store, kept while it is among the latest RING.
(W_VALUE, W_WRITER, W_INFO, W_SCOPE, W_RANK, W_BLOCK, W_MESSAGES, W_NUMBER, W_ATOMIC, W_TAKEN, W_READERS) = range(11)
STORE_WORDS = 12

# What a reader of a store may acquire: a list of release operations.
(G_NEXT, G_WRITER, G_CLOCK, G_SCOPE, G_RANK, G_BLOCK, G_SITE, G_COUNT) = range(8)
MESSAGE_WORDS = 8

# Stores read by a thread since its last wide acquire fence.
(P_NEXT, P_MESSAGES, P_SITE) = range(3)
PENDING_WORDS = 4

# ---- findings

(
    F_KIND,
    F_FIRST,
    F_FIRST_SITE,
    F_FIRST_LAUNCH,
    F_SECOND,
    F_SECOND_SITE,
    F_SECOND_LAUNCH,
    F_ADDRESS,
    F_SIZE,
    F_STEP,
    F_COUNT,
    F_FLAGS,
    F_WAITED,
    F_WAITED_INFO,
    F_WAITED_WRITER,
    F_WAITED_STORE,
) = range(16)
FINDING_WORDS = 16
FINDING_CAPACITY = 512
FIRST_WRITES, SECOND_WRITES, FIRST_ATOMIC, SECOND_ATOMIC = 1, 2, 4, 8
# Another thread of the first's block is known to the second as of then or later; another thread of the second's block knows the first.
FIRST_BLOCK_KNOWN, SECOND_BLOCK_KNOWS, SAME_BLOCK = 16, 32, 64
MOST_LAUNCHES = 1 << 16

(
    FOUND_RACE,
    FOUND_SCOPE_RACE,
    FOUND_MIXED_SIZE,
    FOUND_BOUNDS,
    FOUND_FREED,
    FOUND_UNINITIALISED,
    FOUND_STALE_LAUNCH,
    FOUND_BARRIER_COUNT,
    FOUND_DIVERGENT_BARRIER,
    FOUND_OVERFLOW,
    FOUND_PROXY,
    FOUND_OVERWRITE,
) = range(1, 13)

# ---- the trace of what came to know a watched write

# The thread that came to know it; the sites of the release and of the acquire (the same twice at a barrier); the thread's launch; who
# released (0 at a barrier); the step.
(T_THREAD, T_FROM, T_SITE, T_LAUNCH, T_WRITER, T_STEP) = range(6)
TRACE_WORDS = 6
TRACE_CAPACITY = 8192
