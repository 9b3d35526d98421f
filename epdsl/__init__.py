"""epdsl: a Python-embedded language for expert-parallel communication kernels.

Everything a kernel author uses is here: `import epdsl as ep`. Importing this loads neither MLIR nor a GPU library.
"""

from __future__ import annotations

from epdsl.kernel import Kernel, kernel
from epdsl.lang.bulk import MBarrier, bulk_commit, bulk_copy, bulk_wait, proxy_fence
from epdsl.lang.errors import CompileError
from epdsl.lang.function import func
from epdsl.lang.library import copy, warp_copy, warp_reduce
from epdsl.lang.memory import (
    ACQ_REL,
    ACQUIRE,
    BLOCK,
    DEVICE,
    RELAXED,
    RELEASE,
    SEQ_CST,
    SYSTEM,
    Order,
    Scope,
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_sub,
    atomic_xchg,
    atomic_xor,
    fence,
    load,
    reduce_add,
    reduce_and,
    reduce_max,
    reduce_min,
    reduce_or,
    reduce_sub,
    reduce_xor,
    shared,
    store,
    wait,
)
from epdsl.lang.statements import Unroll as unroll
from epdsl.lang.threads import (
    Group,
    ballot,
    barrier,
    bitcast,
    block_dim,
    block_idx,
    clock,
    count_trailing_zeros,
    device_assert,
    elect,
    fabs,
    floor,
    globaltimer,
    grid_dim,
    group_barrier,
    inline_asm,
    lane_id,
    named_arrive,
    named_barrier,
    popcount,
    printf,
    select,
    shfl,
    shfl_down,
    shfl_up,
    shfl_xor,
    sleep_ns,
    sqrt,
    target,
    thread_idx,
    trap,
    warp_id,
    warp_size,
    warp_sync,
)
from epdsl.lang.threads import all_lanes as all
from epdsl.lang.threads import any_lane as any
from epdsl.lang.threads import max_of as max
from epdsl.lang.threads import min_of as min
from epdsl.lang.types import (
    Array,
    Const,
    Peers,
    Ptr,
    bf16,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i1,
    i8,
    i16,
    i32,
    i64,
    struct,
    u8,
    u16,
    u32,
    u64,
    vec,
)
from epdsl_runtime.artifact import Artifact
from epdsl_runtime.devices import open_device
from epdsl_runtime.rank import Rank
from epdsl_runtime.spawn import init, spawn

__version__ = "0.1.0"
