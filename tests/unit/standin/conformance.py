"""What every driver device must do, run over the stand-in driver through the real bindings: python conformance.py cuda|hip."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
from epdsl_runtime import context_layout as layout
from epdsl_runtime.array import DeviceArray, allocate_array
from epdsl_runtime.artifact import Artifact, Param, Site
from epdsl_runtime.devices import list_devices, open_device, working_kind
from epdsl_runtime.driver_device import DriverDevice, DriverError
from epdsl_runtime.faults import PeerTimeout
from epdsl_runtime.graph import CaptureError, capture
from epdsl_runtime.launch import launcher
from epdsl_runtime.rank import CollectiveError
from epdsl_runtime.sharing import NoSharing
from epdsl_runtime.spawn import spawn

KIND = sys.argv[1] if len(sys.argv) > 1 else os.environ["STANDIN_KIND"]
NOT_PERMITTED = {"cuda": "CUDA_ERROR_NOT_PERMITTED (800)", "hip": "hipErrorNotSupported (801)"}[KIND]
TARGET, VENDOR, WARP = {"cuda": ("sm_90", "nvidia", 32), "hip": ("gfx942", "amd", 64)}[KIND]
SCALARS = (("i8", 1), ("u64", 8), ("bf16", 2), ("f32", 4))
PARAMS = (Param("src", "pointer", "f32", 4, 16), *(Param(f"n{i}", "scalar", dtype, nbytes) for i, (dtype, nbytes) in enumerate(SCALARS)))


def artifact(name: str, params: tuple[Param, ...], **changes) -> Artifact:
    sizes = [slot.nbytes for param in params for slot in param.slots()]
    image = f"KERNEL {name} {' '.join(map(str, [*sizes, 8]))} \n".encode()
    values = {"shared_bytes": 256, "sites": (Site("wait", "a.py", 12, 0, name, "v == 1", ("u32",)),), "binary": image, **changes}
    return Artifact(name=name, target=TARGET, vendor=VENDOR, warp_size=WARP, params=params, **values)


def log() -> list[str]:
    return (Path(os.environ["STANDIN_DIR"]) / f"log.{os.getpid()}").read_text().splitlines()


def without_codes(said) -> str:
    return re.sub(r"EP\d{3}: ", "", str(said))


def raised(kind, call) -> str:
    try:
        call()
    except kind as error:
        return without_codes(error)
    raise AssertionError(f"no {kind.__name__}")


def opened(index: int) -> DriverDevice:
    device = open_device(f"{KIND}:{index}")
    assert isinstance(device, DriverDevice)
    return device


def memory(device: DriverDevice) -> None:
    values = np.arange(1000, dtype=np.float32)
    array = allocate_array(device, (1000,), "f32").copy_from(values)
    np.testing.assert_array_equal(array.numpy(), values)
    other = allocate_array(device, (1000,), "f32").zero()
    assert not other.numpy().any()
    stream = device.stream()
    device.copy(other.address, array.address, 4000, stream)
    device.synchronize(stream)
    np.testing.assert_array_equal(other[10:20].numpy(), values[10:20])
    start, end = device.event(), device.event()
    start.record()
    end.record(stream)
    assert end.elapsed_ms(start) == 0.5
    for made in (stream, start, end):
        made.close()
    array.free()
    assert "no address that allocate returned" in raised(ValueError, lambda: device.free(4096))
    text = raised(DriverError, lambda: device.allocate(1 << 40))
    assert text.startswith(
        {"cuda": "cuMemAlloc(1099511627776) on cuda:1: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory\n", "hip": "hipMalloc"}[KIND]
    ), text
    assert "1099511627776 bytes asked for" in text


def launches(device: DriverDevice) -> None:
    kernel = artifact("copy", PARAMS)
    array = allocate_array(device, (8,), "f32")
    run = launcher(device, kernel)
    run.launch(grid=(3, 2), block=WARP, args=(array, -1, 2**64 - 1, 1.5, 1.5))
    line = log()[-1]
    context = f"{device.context_address:x}"
    assert line.split()[1:] == [
        "copy",
        "grid=3,2,1",
        f"block={WARP},1,1",
        "shared=256",
        "stream=0",
        f"params={array.address:x},ff,ffffffffffffffff,3fc0,3fc00000,{context}",
    ], line
    stream = device.stream()
    prepared = run.prepare(grid=1, block=2 * WARP, args=(array, 1, 2, 0.5, 0.5), stream=stream, shared_bytes=1000)
    prepared()
    prepared.set(n1=7, n2=-2.0)()
    assert [entry.split(" ", 1)[1] for entry in log()[-2:]] == [
        f"copy grid=1,1,1 block={2 * WARP},1,1 shared=1256 stream=1 params={array.address:x},1,{rest},{context}"
        for rest in ("2,3f00,3f000000", "7,c000,3f000000")
    ]
    assert run.function.resident_blocks(256, 0) == 8 * device.info.num_sms
    run.launch(grid=1, block=WARP, args=(array, 0, 0, 0, 0), shared_bytes=60000)
    if KIND == "cuda":
        assert "cuFuncSetAttribute 60256" in log() and "cuFuncLoad copy" in log()
    device.synchronize()


def loading(device: DriverDevice) -> None:
    broken = artifact("copy", PARAMS, binary=b"a syntax mistake")
    text = raised(DriverError, lambda: launcher(device, broken))
    if KIND == "cuda":
        assert "cuModuleLoadDataEx(copy) on cuda:1: CUDA_ERROR_INVALID_PTX (218)" in text and "line 3; error: syntax error" in text, text
    else:
        assert "hipModuleLoadData(16 bytes of copy) on hip:1: hipErrorInvalidImage (200)" in text, text
    assert "(500)" in raised(DriverError, lambda: launcher(device, artifact("copy", PARAMS, binary=b"KERNEL another 8 8\n")))


def faults(device: DriverDevice) -> None:
    kernel = artifact("fault", (Param("site", "scalar", "u64", 8),))
    device.context_words[layout.RANK] = 6
    word = kernel.site_tag << 32
    launcher(device, kernel).launch(grid=1, block=WARP, args=(word,))
    text = raised(PeerTimeout, device.synchronize)
    assert "rank 6, kernel fault, a.py:12, block 2 thread 3" in text, text
    device.synchronize()


def waits(device: DriverDevice) -> None:
    """A wait that goes on, said as a kernel says it; and a device that is closed while somebody looks at it."""
    kernel = artifact("waiter", (Param("site", "scalar", "u64", 8),))
    launcher(device, kernel)
    halves = device.context_words.view(np.uint32)
    assert halves[0] == 2 * (8 + 64 * 8 + 2048 * 12)

    def say(tick: int) -> None:
        halves[50192 + 3 * 16 :][:13] = [tick, 0, kernel.site_tag, 0x1000, 0, 1, 0, 5, 0, 10 << 26, 0, 2 * 1024 + 3, tick]

    say(20)
    threading.Timer(0.1, say, (25,)).start()
    first = "rank 6 waiter: waiting for memory at a.py:12: v == 1 (compared with 1) for 1.0 s"
    assert device.waiting() == [first, "  block 2 thread 3", "  address 0x1000 holds 5"]
    assert device.waiting() == []
    say(30)
    looks = threading.Thread(target=device.waiting)
    looks.start()
    time.sleep(0.05)
    device.close()
    looks.join(2)
    assert not looks.is_alive() and device.waiting() == []


def peers(device: DriverDevice, other: DriverDevice) -> None:
    mine, _ = device.allocate_shared(16, "ipc")
    handle = device.export_memory(mine)
    address = other.open_memory(handle)
    assert address == mine and other.open_memory(handle) == address
    call = {"cuda": "cuCtxEnablePeerAccess", "hip": "hipDeviceEnablePeerAccess"}[KIND]
    assert log().count(f"{call} 0->1") == 1
    other.close_memory(address)
    assert "only whole allocations" in raised(ValueError, lambda: device.export_memory(mine + 4))
    device.free(mine)
    if KIND == "hip":
        cached = device.allocate(16)
        assert "hipIpcGetMemHandle" in raised(DriverError, lambda: device.export_memory(cached))
        device.free(cached)


def crash(device: DriverDevice) -> None:
    kernel = artifact("crash", (Param("site", "scalar", "u64", 8),))
    launcher(device, kernel).launch(grid=1, block=WARP, args=(kernel.site_tag << 32,))
    text = raised(PeerTimeout, device.synchronize)
    name = {"cuda": "CUDA_ERROR_ILLEGAL_ADDRESS", "hip": "hipErrorIllegalAddress"}[KIND]
    assert "kernel crash" in text and f"{name} (700): an illegal memory access was encountered" in text, text
    assert name in raised(DriverError, device.synchronize)


def graphs(device: DriverDevice) -> None:
    array = allocate_array(device, (8,), "f32")
    run = launcher(device, artifact("copy", PARAMS))
    prepared = run.prepare(grid=1, block=WARP, args=(array, 1, 2, 0.5, 0.5))
    before = log()
    with capture(device) as graph:
        run.launch(grid=2, block=WARP, args=(array, -1, 0, 0.0, 0.0))
        prepared.set(n1=7)()
        for text, refused in {
            "an allocation of 4 bytes on": lambda: allocate_array(device, (1,), "f32"),
            "an upload of 32 bytes on": lambda: array.copy_from(np.zeros(8, np.float32)),
            "a synchronisation on": device.synchronize,
            "work for another stream on": lambda: run.launch(grid=1, block=WARP, args=(array, 0, 0, 0, 0), stream=0),
            "the loading of other on": lambda: launcher(device, artifact("other", ())),
        }.items():
            assert text in raised(CaptureError, refused)
    assert log() == before, "a capture ran something"
    stream = device.stream()
    graph.replay()
    prepared.set(n1=9)()
    graph.replay(stream)
    context = f"{device.context_address:x}"
    lines = [
        f"copy grid={grid},1,1 block={WARP},1,1 shared=256 stream=1 params={array.address:x},{rest},{context}"
        for grid, rest in ((2, "ff,0,0,0"), (1, "1,7,3f00,3f000000"))
    ]
    found = [entry for entry in log()[len(before) :] if entry.startswith("replay")]
    assert [entry.split(" ", 3)[1] for entry in found] == ["stream=0", "stream=0", "stream=1", "stream=1"], found
    assert [entry.split(" ", 3)[3] for entry in found] == lines * 2, found
    array.free()
    assert "uses memory that was freed since its capture" in raised(CaptureError, graph.replay)
    graph.close()
    assert log()[-1] == {"cuda": "cuGraphExecDestroy", "hip": "hipGraphExecDestroy"}[KIND]
    stream.close()
    prepared.set(src=allocate_array(device, (8,), "f32"))

    def spoil() -> None:
        with capture(device):
            prepared()
            device.driver.synchronize()

    name = {"cuda": "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "hip": "hipErrorStreamCaptureUnsupported"}[KIND]
    assert f"{name} (900)" in raised(DriverError, spoil)
    device.synchronize()


def exchange(rank) -> list[int]:
    """Two processes write into each other's memory."""
    made = rank.symmetric("i32", 2)
    rank.barrier()
    table = made.peers.table.numpy()
    for peer in range(rank.size):
        rank.device.upload(int(table[peer]) + 4 * rank.index, np.array([10 + rank.index], np.int32))
    rank.barrier()
    again = rank.symmetric("u8", 5000000)
    rank.device.memset(again.peers.addresses[1 - rank.index], 7 + rank.index, 5000000)
    rank.barrier()
    assert (again.local.numpy() == 8 - rank.index).all()
    found = made.local.numpy().tolist()
    rank.release(again, made)
    return found


def sharing(rank) -> str:
    """Every kind the device has, taken and forced; what an unknown or a broken one says. Then memory of other allocators."""

    def text(wanted: str) -> str:
        rank._wanted_sharing, rank._sharing = wanted, None
        assert exchange(rank) == [10, 11]
        return without_codes(rank.sharing())

    fabric = " (no fabric: rank 0: cuMemCreate(2097152, ..., 0) on cuda:0: CUDA_ERROR_NOT_PERMITTED (800): operation not permitted)"
    assert text("auto") == "fd" + (fabric if KIND == "cuda" else "") and text("fd") == "fd" and text("ipc") == "ipc"
    os.environ["STANDIN_NO_FD"] = "1"
    found = text("auto")
    assert found.startswith("ipc (") and "no fd: rank 0: " in found and NOT_PERMITTED in found, found
    found = raised(NoSharing, lambda: text("fd"))
    assert found.startswith("peer memory by fd was asked for (EPDSL_PEER_MEMORY) and does not work: fd: rank 0: "), found
    found = raised(ValueError, lambda: text("smoke"))
    assert found.startswith("peer memory by 'smoke': <"), found
    del os.environ["STANDIN_NO_FD"]
    if KIND == "cuda":
        grown(rank)
        registered(rank)
        return "shared"
    old_libraries(text)
    array = rank.array(np.zeros(64, np.int32))
    found = raised(CollectiveError, lambda: rank.register(Foreign(array.address, 16)))
    assert "hip:0 cannot be shared with other ranks: memory of other allocators is cached by an AMD GPU" in found, found
    return "shared"


def old_libraries(text) -> None:
    """HIP before a descriptor was passed by value, and without uncached memory for descriptors."""
    os.environ["STANDIN_HIP_VERSION"] = "70051831"
    assert text("auto") == "fd"
    os.environ["STANDIN_NO_UNCACHED"] = "1"
    found = text("auto")
    assert found.startswith("ipc (no fd: rank 0: hipMemGetAllocationGranularity(") and "hipErrorInvalidValue (1)" in found, found
    del os.environ["STANDIN_HIP_VERSION"], os.environ["STANDIN_NO_UNCACHED"]


class Foreign:
    """An array of another library."""

    def __init__(self, address: int, elements: int) -> None:
        self.shape = (elements,)
        self.__cuda_array_interface__ = {"shape": self.shape, "typestr": "<i4", "data": (address, False), "version": 3}


def registered(rank) -> None:
    """Memory of another allocator, registered: here a part of a plain allocation, as a library's array would be."""
    whole = rank.array(np.full(64, rank.index, np.int32))
    rank.barrier()
    made = rank.register(Foreign(whole.address + 64, 16), "a tensor")
    assert made.local.numpy().tolist() == [rank.index] * 16
    rank.barrier()
    rank.device.upload(made.peers.addresses[1 - rank.index], np.full(1, 100 + rank.index, np.int32))
    rank.barrier()
    found = whole.numpy().tolist()
    rank.release(made)
    assert found[15:18] == [rank.index, 101 - rank.index, rank.index], found


def grown(rank) -> None:
    """Memory that an allocator mapped piece by piece: a registered array may span the pieces."""
    calls = rank.device.driver.virtual
    step = calls.granularity("fd")
    base = calls.reserve(3 * step, 0)
    for piece, length in ((0, 1), (1, 2)):
        handle = calls.create(length * step, "fd")
        calls.map(base + piece * step, length * step, handle)
        calls.release(handle)
    calls.allow(base, 3 * step)
    whole = DeviceArray(rank.device, base, (3 * step // 4,), "i32").zero()
    made = rank.register(Foreign(base + 64, step // 2))
    rank.barrier()
    for at, value in ((0, 20), (step // 4, 10), (step // 2 - 1, 10)):
        rank.device.upload(made.peers.addresses[1 - rank.index] + 4 * at, np.full(1, value + rank.index, np.int32))
    rank.barrier()
    found = whole.numpy()
    assert np.count_nonzero(found) == 3
    rank.release(made)
    for piece, length in ((0, 1), (1, 2)):
        calls.unmap(base + piece * step, length * step)
    calls.unreserve(base, 3 * step)
    assert [int(found[16 + at]) for at in (0, step // 4, step // 2 - 1)] == [21 - rank.index, *[11 - rank.index] * 2]


def main() -> None:
    assert working_kind() == KIND
    found = {entry.spec: entry for entry in list_devices()}
    info = found[f"{KIND}:1"].info
    assert info is not None and (info.target, info.vendor, info.warp_size, info.name) == (TARGET, VENDOR, WARP, "stand-in 1")
    sizes = (info.num_sms, info.max_threads_per_block, info.max_shared_bytes, info.total_memory)
    assert sizes == {"cuda": (132, 1024, 232448, 1 << 30), "hip": (304, 1024, 65536, 1 << 30)}[KIND]
    assert info.uuid == {"cuda": "GPU-31323334-3536-3738-3961-626364656630", "hip": "GPU-123456789abcdef0"}[KIND], info.uuid
    if KIND == "hip":
        os.environ["STANDIN_NO_UUID"] = "1"
        assert [entry.info.uuid for entry in list_devices() if entry.spec.startswith("hip:") and entry.info] == [
            "PCI-0000:c3:00",
            "PCI-0000:c4:00",
        ]
        del os.environ["STANDIN_NO_UUID"]
    kinds = dict(found[f"{KIND}:1"].peer_memory)
    assert (kinds["fd"], kinds["ipc"]) == (None, None) and "NOT_PERMITTED" in str(kinds.get("fabric", "NOT_PERMITTED")), kinds
    device, other = opened(1), opened(0)
    memory(device)
    launches(device)
    loading(device)
    faults(device)
    graphs(device)
    peers(device, other)
    other.close()
    # A launch for every rank's own device; the ranks are processes.
    assert spawn(exchange, 2, device=KIND, peer_memory="ipc") == [[10, 11]] * 2
    assert spawn(sharing, 2, device=KIND) == ["shared"] * 2
    assert "3 ranks need 3 GPUs, this process sees 2" in raised(ValueError, lambda: spawn(exchange, 3, device=KIND))
    waits(device)
    device.close()
    for call in (device.synchronize, lambda: device.allocate(4), lambda: device.allocate_shared(4, "fd"), lambda: device.memset(0, 0, 4)):
        assert "was closed; open another" in raised(RuntimeError, call)
    host = {"cuda": ("cuMemHostAlloc", "cuMemFreeHost"), "hip": ("hipHostMalloc", "hipHostFree")}[KIND]
    assert len({sum(line.startswith(call) for line in log()) for call in host}) == 1, "page-locked memory is left"
    if KIND == "cuda":
        assert log()[-1].startswith("cuDevicePrimaryCtxRelease") and log()[-1].endswith("left=0")
    assert log().count({"cuda": "cuModuleUnload", "hip": "hipModuleUnload"}[KIND]) == 5
    ends = [
        [line for line in path.read_text().splitlines() if line.startswith("unreserved")]
        for path in Path(os.environ["STANDIN_DIR"]).glob("log.*")
    ]
    assert sum(map(bool, ends)) >= 3 and all(lines[-1] == "unreserved left=0 handles=0" for lines in ends if lines), ends
    leftover = [path.name for path in Path(os.environ["STANDIN_DIR"]).glob("m*")]
    assert not leftover, leftover
    crash(opened(1))
    print("conforms")


if __name__ == "__main__":
    main()
