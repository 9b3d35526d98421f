"""Memory layout of the simulator's engine: what compiled kernels, the scheduler and the host share. All fields are 64-bit words."""

from __future__ import annotations

# ---- a thread

(
    T_HANDLE,
    T_OP,
    T_SITE,
    T_A0,
    T_A1,
    T_A2,
    T_A3,
    T_RESULT,
    T_BLOCK,
    T_X,
    T_Y,
    T_Z,
    T_LANE,
    T_WARP,
    T_LAUNCH,
    T_MASK,
    T_DEPTH,
) = range(17)
# Lanes that run in lockstep with this one are T_MASK; what it was before each branch still open, as (join, mask), T_DEPTH of them:
T_STACK = 17
STACK_DEPTH = 15
# In a checked run, where the checker keeps what it knows of the thread.
T_CHECK = T_STACK + 2 * STACK_DEPTH
THREAD_WORDS = T_CHECK + 1

# What a thread is doing (T_OP). Up to OP_YIELD it may be resumed.
(
    OP_READY,
    OP_YIELD,
    OP_POLL,
    OP_SLEEP,
    OP_BARRIER,
    OP_NAMED,
    OP_ARRIVE,
    OP_SYNC,
    OP_SHUFFLE,
    OP_VOTE,
    OP_ELECT,
    OP_DONE,
    OP_TRAP,
    OP_ABSENT,
    OP_SPLIT,
    OP_JOIN,
    OP_HELD,
) = range(17)
OP_NAMES = (
    "runnable",
    "going round a loop",
    "waiting for memory",
    "asleep",
    "at the block barrier",
    "at a named barrier",
    "arriving at a named barrier",
    "at a warp sync",
    "at a shuffle",
    "at a vote",
    "at an election",
    "finished",
    "trapped",
    "not started",
    "at a branch of its wave",
    "where its wave meets again",
    "held while other lanes of its wave are in the branch",
)
# A0, A1, A2, A3 by operation:
#   POLL     address, value seen, bits, timeout          result: 1 when given up
#   YIELD    1 when the loop ends whatever other threads do
#   SLEEP    wake time
#   BARRIER                                              result: 1 when the thread is to end there
#   NAMED    id, threads
#   SYNC     mask
#   SHUFFLE  mask, kind (0 idx, 1 up, 2 down, 3 xor), lane or distance, value     result: the value read
#   VOTE     mask, kind (0 ballot, 1 any, 2 all), predicate                        result: ballot or 0/1
#   SPLIT    join, direction taken, direction that runs first
#   JOIN     join
#   HELD     join, -, -, lanes that run first
#   ELECT    mask                                                                  result: 1 in one lane

SHUFFLE_KINDS = ("idx", "up", "down", "xor")
VOTE_KINDS = ("ballot", "any", "all")

# ---- a block

(
    B_LAUNCH,
    B_X,
    B_Y,
    B_Z,
    B_SHARED,
    B_THREADS,
    B_ALIVE,
    B_ARRIVED,
    B_ACTIVE,
    B_FAULTED,
) = range(10)
# B_FAULTED: 1 once a thread of the block has given up a wait or failed an assert.
B_NAMED = 16  # 16 words: arrivals at each named barrier
BLOCK_WORDS = 32

# ---- a launch

(
    L_ENTRY,
    L_ARGS,
    L_GX,
    L_GY,
    L_GZ,
    L_DX,
    L_DY,
    L_DZ,
    L_BLOCKS,
    L_NEXT,
    L_DONE,
    L_SLOTS,
    L_SLOT_COUNT,
    L_THREADS,
    L_WARP_SIZE,
    L_LOCKSTEP,
    L_DEVICE,
    L_COST,
    L_SEED,
    L_ENGINE,
    L_TRAPS,
) = range(21)
LAUNCH_WORDS = 24

# ---- a device

D_USED, D_CAPACITY = range(2)
DEVICE_WORDS = 2

# ---- the engine

(
    E_LAUNCHES,
    E_COUNT,
    E_RANDOM,
    E_TIME,
    E_RESUMES,
    E_PASSES,
    E_SPINS,
    E_SPIN_LIMIT,
    E_STATUS,
    E_USEFUL,
    E_SPIN_RESUMES,
    E_MODE,
    E_LEVEL,
    E_SALT,
    E_STARVED,
    E_SWEPT,
    E_HOOK,
    E_SHOWN,
    E_STEPPED,
) = range(19)
ENGINE_WORDS = 20

# A debugger: E_HOOK(thread, site) is called where one stops, with the variables' values in slots of SLOT_BYTES at E_SHOWN, and answers 0
# to go on. E_STEPPED: the thread that also stops at lines; EVERY_THREAD or none (0).
SLOT_BYTES = 16
EVERY_THREAD = 1

# Who gets a turn (E_MODE). ROUND: everyone in turn. UNIFORM: each with probability 1/2. PRIORITY: only the runnable threads of the highest
# of LEVELS priorities, which are drawn anew now and then (E_SALT). STARVE: the device E_STARVED only when nobody else can go on.
MODE_ROUND, MODE_UNIFORM, MODE_PRIORITY, MODE_STARVE = range(4)
MODES = ("round", "uniform", "pct", "starve")
LEVELS = 8

STATUS_FINISHED = 1  # at least one launch has ended, or trapped
STATUS_STUCK = 2  # nothing can run
STATUS_LIVELOCK = 3  # only loops that look at memory run, without end
