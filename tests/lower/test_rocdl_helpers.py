"""The barriers AMD lacks, run on the host: a wave is a host thread, block-shared memory is ordinary memory."""

import ctypes
import random
import re
import threading

import llvmlite.binding as llvm
import pytest
from lower_harness import lower

from epdsl import codegen

HOST = """
declare i32 @sched_yield()
define internal i64 @host_ballot(i1 %p) { ret i64 1 }
define internal i32 @host_mbcnt(i32 %a, i32 %b) { ret i32 0 }
define internal i32 @host_same(i32 %a) { ret i32 %a }
define internal void @host_wait(i32 %a) {
  %ignored = call i32 @sched_yield()
  ret void
}
define internal void @host_barrier() { ret void }
define internal i32 @host_zero() { ret i32 0 }
"""
STAND_INS = {
    "llvm.amdgcn.ballot.i64": "host_ballot",
    "llvm.amdgcn.mbcnt.lo": "host_mbcnt",
    "llvm.amdgcn.mbcnt.hi": "host_mbcnt",
    "llvm.amdgcn.readfirstlane.i32": "host_same",
    "llvm.amdgcn.s.sleep": "host_wait",
    "llvm.amdgcn.s.waitcnt": "host_wait",
    "llvm.amdgcn.s.barrier": "host_barrier",
    **{f"llvm.amdgcn.workitem.id.{a}": "host_zero" for a in "xyz"},
}
EMPTY = "module attributes {gpu.container_module} { gpu.module @kernel_module { gpu.func @k() kernel { gpu.return } } }"


@pytest.fixture(scope="module")
def host():
    """Calls a helper by name with integers, pointers among them."""
    module, _ = lower(EMPTY, "gfx1100")
    text = codegen.translate(module)
    text = re.sub(r"define amdgpu_kernel .*?\n}\n", "", text, flags=re.S)
    text = re.sub(r"define internal (?=\w+ @ep_(mbarrier|named))", "define ", text)
    text = re.sub(r"define internal void @ep_(bulk|sleep).*?\n}\n", "", text, flags=re.S)
    text = re.sub(r'ptr addrspace\(3\)|syncscope\("workgroup"\) |addrspace\(3\) ', lambda m: "ptr" if m[0][0] == "p" else "", text)
    text = text.replace("@ep_named_barriers = internal", "@ep_named_barriers =")
    for name, stand_in in STAND_INS.items():
        text = re.sub(rf"declare .*@{re.escape(name)}\(.*\n", "", text)
        text = text.replace(f"@{name}(", f"@{stand_in}(")
    text = re.sub(r"declare .*@llvm\.(readsteadycounter|amdgcn)\S*\(.*\n", "", text)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    unit = llvm.parse_assembly(text + HOST)
    engine = llvm.create_mcjit_compiler(unit, llvm.Target.from_default_triple().create_target_machine(opt=2))
    engine.finalize_object()

    def function(name, result, *arguments):
        return ctypes.CFUNCTYPE(result, *arguments)(engine.get_function_address(name))

    yield function
    engine.close()


def test_mbarrier(host):
    pointer, i32 = ctypes.c_void_p, ctypes.c_int32
    init = host("ep_mbarrier_init", None, pointer, i32)
    arrive = host("ep_mbarrier_arrive", None, pointer)
    expect = host("ep_mbarrier_expect", None, pointer, i32)
    update = host("ep_mbarrier_update", None, pointer, i32, i32)
    test = host("ep_mbarrier_test", ctypes.c_bool, pointer, i32)
    word = ctypes.c_uint64(2**64 - 1)
    at = ctypes.addressof(word)

    init(at, 2)
    assert (test(at, 0), test(at, 1)) == (False, True)
    for phase in range(5):
        parity = phase & 1
        arrive(at)
        assert not test(at, parity)
        arrive(at)
        assert test(at, parity)
        assert not test(at, parity ^ 1)

    init(at, 1)
    expect(at, 4096)
    assert not test(at, 0), "arrived, but the bytes have not"
    update(at, 0, -1024)
    assert not test(at, 0)
    update(at, 0, -3072)
    assert test(at, 0)
    update(at, 0, -16)
    assert not test(at, 1), "bytes may come before they are announced"
    expect(at, 16)
    assert test(at, 1)


def test_mbarrier_under_contention(host):
    waves, phases = 4, 300
    arrive = host("ep_mbarrier_arrive", None, ctypes.c_void_p)
    test = host("ep_mbarrier_test", ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32)
    word = ctypes.c_uint64()
    host("ep_mbarrier_init", None, ctypes.c_void_p, ctypes.c_int32)(ctypes.addressof(word), waves)
    reached = [0] * waves
    errors = []

    def wave(index):
        for phase in range(phases):
            reached[index] = phase + 1
            arrive(ctypes.addressof(word))
            while not test(ctypes.addressof(word), phase & 1):
                pass
            if min(reached) < phase + 1:
                errors.append((index, phase, list(reached)))

    run([lambda i=i: wave(i) for i in range(waves)])
    assert errors == []


def run(bodies):
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a wave never left its barrier"


@pytest.mark.parametrize("waves", [1, 2, 3, 4])
def test_named_barrier_keeps_waves_together(host, waves):
    host("ep_named_barriers_clear", None)()
    barrier = host("ep_named_barrier", None, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool)
    reached, errors, seed = [0] * waves, [], random.randrange(2**32)
    print("seed", seed)

    def wave(index):
        source = random.Random(seed + index)
        for phase in range(400):
            for _ in range(source.randrange(50)):
                pass
            reached[index] = phase + 1
            barrier(5, waves, True)
            if min(reached) < phase + 1 or max(reached) > phase + 2:
                errors.append((index, phase, list(reached)))

    run([lambda i=i: wave(i) for i in range(waves)])
    assert errors == []


def test_named_arrive_hands_buffers_over(host):
    """A producer fills two buffers in turn, a consumer empties them: barriers full[i] and empty[i], one side arrives, the other waits."""
    host("ep_named_barriers_clear", None)()
    barrier = host("ep_named_barrier", None, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool)
    buffers, got, rounds = [None, None], [], 500

    def producer():
        for i in range(rounds):
            barrier(2 + i % 2, 2, True)  # empty
            buffers[i % 2] = i
            barrier(i % 2, 2, False)  # full

    def consumer():
        barrier(2, 2, False)
        barrier(3, 2, False)
        for i in range(rounds):
            barrier(i % 2, 2, True)
            got.append(buffers[i % 2])
            buffers[i % 2] = None
            barrier(2 + i % 2, 2, False)

    run([producer, consumer])
    assert got == list(range(rounds))


def test_a_phase_counter_wraps(host):
    host("ep_named_barriers_clear", None)()
    barrier = host("ep_named_barrier", None, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool)
    for _ in range(70000):
        barrier(9, 1, True)
