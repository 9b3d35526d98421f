"""Device functions for what AMD hardware lacks, as MLIR text. Each is inlined where it is called and dropped where it is not."""

# gfx9: the fence alone leaves the wave's stores in flight, which is enough for other waves of the block to see them but not for one of
# them to release them further (the back end waits on later chips; llvm-project #161638). 3952 is vmcnt(0).
RELEASE_GFX9 = """
llvm.func internal @ep_release_block() attributes {always_inline} {
  %vmcnt_0 = llvm.mlir.constant(3952 : i32) : i32
  llvm.fence syncscope("workgroup") release
  llvm.call_intrinsic "llvm.amdgcn.s.waitcnt"(%vmcnt_0) : (i32) -> ()
  llvm.return
}
"""
RELEASE = """
llvm.func internal @ep_release_block() attributes {always_inline} {
  llvm.fence syncscope("workgroup") release
  llvm.return
}
"""

HELPERS = """
llvm.module_flags [#llvm.mlir.module_flag<error, "amdhsa_code_object_version", 500 : i32>]

llvm.func internal @ep_lane_id() -> i32 attributes {always_inline} {
  %all = llvm.mlir.constant(-1 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %low = llvm.call_intrinsic "llvm.amdgcn.mbcnt.lo"(%all, %zero) : (i32, i32) -> i32
  %lane = llvm.call_intrinsic "llvm.amdgcn.mbcnt.hi"(%all, %low) : (i32, i32) -> i32
  llvm.return %lane : i32
}

llvm.func internal @ep_block_barrier() attributes {always_inline} {
  llvm.call @ep_release_block() : () -> ()
  llvm.call_intrinsic "llvm.amdgcn.s.barrier"() : () -> ()
  llvm.fence syncscope("workgroup") acquire
  llvm.return
}

// Sleeps %ns nanoseconds on the 100 MHz clock.
llvm.func internal @ep_sleep(%ns: i32) attributes {always_inline} {
  %one = llvm.mlir.constant(1 : i32) : i32
  %tick = llvm.mlir.constant(10 : i32) : i32
  %ticks32 = llvm.udiv %ns, %tick : i32
  %ticks = llvm.zext %ticks32 : i32 to i64
  %started = llvm.call_intrinsic "llvm.readsteadycounter"() : () -> i64
  llvm.br ^look
^look:
  llvm.call_intrinsic "llvm.amdgcn.s.sleep"(%one) : (i32) -> ()
  %now = llvm.call_intrinsic "llvm.readsteadycounter"() : () -> i64
  %passed = llvm.sub %now, %started : i64
  %again = llvm.icmp "ult" %passed, %ticks : i64
  llvm.cond_br %again, ^look, ^done
^done:
  llvm.return
}

// Barriers for part of a block. Each word: waves that have arrived in bits 0..15, phase in bits 16..31.
llvm.mlir.global internal @ep_named_barriers() {addr_space = 3 : i32, alignment = 64 : i64} : !llvm.array<16 x i32> {
  %poison = llvm.mlir.poison : !llvm.array<16 x i32>
  llvm.return %poison : !llvm.array<16 x i32>
}

llvm.func internal @ep_named_barriers_clear() attributes {always_inline} {
  %zero = llvm.mlir.constant(0 : i32) : i32
  %zeros = llvm.mlir.constant(dense<0> : vector<16xi32>) : vector<16xi32>
  %words = llvm.mlir.addressof @ep_named_barriers : !llvm.ptr<3>
  %x = llvm.call_intrinsic "llvm.amdgcn.workitem.id.x"() : () -> i32
  %y = llvm.call_intrinsic "llvm.amdgcn.workitem.id.y"() : () -> i32
  %z = llvm.call_intrinsic "llvm.amdgcn.workitem.id.z"() : () -> i32
  %xy = llvm.or %x, %y : i32
  %xyz = llvm.or %xy, %z : i32
  %first = llvm.icmp "eq" %xyz, %zero : i32
  llvm.cond_br %first, ^clear, ^join
^clear:
  llvm.store %zeros, %words {alignment = 64 : i64} : vector<16xi32>, !llvm.ptr<3>
  llvm.br ^join
^join:
  llvm.call @ep_block_barrier() : () -> ()
  llvm.return
}

// The first lane of the wave arrives. The wave that completes a phase takes its %waves off the count and adds one to the phase; a wave
// of the next phase that arrives in between sees a count of at least %waves.
llvm.func internal @ep_named_barrier(%id: i32, %waves: i32, %waits: i1) attributes {always_inline} {
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %zero16 = llvm.mlir.constant(0 : i16) : i16
  %sixteen = llvm.mlir.constant(16 : i32) : i32
  %count_mask = llvm.mlir.constant(65535 : i32) : i32
  %phase_unit = llvm.mlir.constant(65536 : i32) : i32
  %true = llvm.mlir.constant(true) : i1
  %words = llvm.mlir.addressof @ep_named_barriers : !llvm.ptr<3>
  %word = llvm.getelementptr %words[%id] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  llvm.call @ep_release_block() : () -> ()
  %running = llvm.call_intrinsic "llvm.amdgcn.ballot.i64"(%true) : (i1) -> i64
  %lowest64 = "llvm.intr.cttz"(%running) <{is_zero_poison = false}> : (i64) -> i64
  %lowest = llvm.trunc %lowest64 : i64 to i32
  %lane = llvm.call @ep_lane_id() : () -> i32
  %first = llvm.icmp "eq" %lane, %lowest : i32
  llvm.cond_br %first, ^arrive, ^arrived(%zero : i32)
^arrive:
  %old = llvm.atomicrmw add %word, %one syncscope("workgroup") monotonic : !llvm.ptr<3>, i32
  %count = llvm.and %old, %count_mask : i32
  %phase = llvm.lshr %old, %sixteen : i32
  %early = llvm.icmp "uge" %count, %waves : i32
  %early32 = llvm.zext %early : i1 to i32
  %mine = llvm.add %phase, %early32 : i32
  %next = llvm.add %mine, %one : i32
  %now_in = llvm.add %count, %one : i32
  %last = llvm.icmp "eq" %now_in, %waves : i32
  llvm.cond_br %last, ^complete, ^arrived(%next : i32)
^complete:
  %difference = llvm.sub %phase_unit, %waves : i32
  %unused = llvm.atomicrmw add %word, %difference syncscope("workgroup") monotonic : !llvm.ptr<3>, i32
  llvm.br ^arrived(%next : i32)
^arrived(%wanted_lane: i32):
  llvm.cond_br %waits, ^wait, ^done
^wait:
  %wanted = llvm.call_intrinsic "llvm.amdgcn.readfirstlane.i32"(%wanted_lane) : (i32) -> i32
  llvm.br ^look
^look:
  %seen = llvm.load %word atomic syncscope("workgroup") monotonic {alignment = 4 : i64} : !llvm.ptr<3> -> i32
  %seen_phase = llvm.lshr %seen, %sixteen : i32
  %ahead32 = llvm.sub %seen_phase, %wanted : i32
  %ahead = llvm.trunc %ahead32 : i32 to i16
  %complete = llvm.icmp "sge" %ahead, %zero16 : i16
  llvm.cond_br %complete, ^acquire, ^again
^again:
  llvm.call_intrinsic "llvm.amdgcn.s.sleep"(%one) : (i32) -> ()
  llvm.br ^look
^acquire:
  llvm.fence syncscope("workgroup") acquire
  llvm.br ^done
^done:
  llvm.return
}

// An mbarrier's 64 bits: bytes announced and not yet copied in 0..31, arrivals missing in 32..46, arrivals a phase in 47..61, phase in 63.
llvm.func internal @ep_mbarrier_init(%barrier: !llvm.ptr<3>, %count: i32) attributes {always_inline} {
  %fifteen = llvm.mlir.constant(15 : i32) : i32
  %thirty_two = llvm.mlir.constant(32 : i64) : i64
  %a_phase = llvm.shl %count, %fifteen : i32
  %high32 = llvm.or %a_phase, %count : i32
  %high = llvm.zext %high32 : i32 to i64
  %state = llvm.shl %high, %thirty_two : i64
  llvm.call @ep_release_block() : () -> ()
  llvm.store %state, %barrier atomic syncscope("workgroup") monotonic {alignment = 8 : i64} : i64, !llvm.ptr<3>
  llvm.return
}

llvm.func internal @ep_mbarrier_update(%barrier: !llvm.ptr<3>, %arrivals: i32, %bytes: i32) attributes {always_inline} {
  %zero = llvm.mlir.constant(0 : i32) : i32
  %fifteen = llvm.mlir.constant(15 : i32) : i32
  %missing_mask = llvm.mlir.constant(32767 : i32) : i32
  %phase_bit = llvm.mlir.constant(-2147483648 : i32) : i32
  %thirty_two = llvm.mlir.constant(32 : i64) : i64
  llvm.call @ep_release_block() : () -> ()
  %seen = llvm.load %barrier atomic syncscope("workgroup") monotonic {alignment = 8 : i64} : !llvm.ptr<3> -> i64
  llvm.br ^try(%seen : i64)
^try(%old: i64):
  %old_bytes = llvm.trunc %old : i64 to i32
  %old_high64 = llvm.lshr %old, %thirty_two : i64
  %old_high = llvm.trunc %old_high64 : i64 to i32
  %new_bytes = llvm.add %old_bytes, %bytes : i32
  %high = llvm.sub %old_high, %arrivals : i32
  %missing = llvm.and %high, %missing_mask : i32
  %open = llvm.or %new_bytes, %missing : i32
  %complete = llvm.icmp "eq" %open, %zero : i32
  %a_phase_and_bit = llvm.lshr %high, %fifteen : i32
  %a_phase = llvm.and %a_phase_and_bit, %missing_mask : i32
  %refilled = llvm.or %high, %a_phase : i32
  %flipped = llvm.xor %refilled, %phase_bit : i32
  %new_high = llvm.select %complete, %flipped, %high : i1, i32
  %new_bytes64 = llvm.zext %new_bytes : i32 to i64
  %new_high64 = llvm.zext %new_high : i32 to i64
  %shifted = llvm.shl %new_high64, %thirty_two : i64
  %new = llvm.or %shifted, %new_bytes64 : i64
  %swapped = llvm.cmpxchg %barrier, %old, %new syncscope("workgroup") monotonic monotonic : !llvm.ptr<3>, i64
  %now = llvm.extractvalue %swapped[0] : !llvm.struct<(i64, i1)>
  %done = llvm.extractvalue %swapped[1] : !llvm.struct<(i64, i1)>
  llvm.cond_br %done, ^end, ^try(%now : i64)
^end:
  llvm.return
}

llvm.func internal @ep_mbarrier_arrive(%barrier: !llvm.ptr<3>) attributes {always_inline} {
  %one = llvm.mlir.constant(1 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  llvm.call @ep_mbarrier_update(%barrier, %one, %zero) : (!llvm.ptr<3>, i32, i32) -> ()
  llvm.return
}

llvm.func internal @ep_mbarrier_expect(%barrier: !llvm.ptr<3>, %bytes: i32) attributes {always_inline} {
  %one = llvm.mlir.constant(1 : i32) : i32
  llvm.call @ep_mbarrier_update(%barrier, %one, %bytes) : (!llvm.ptr<3>, i32, i32) -> ()
  llvm.return
}

llvm.func internal @ep_mbarrier_test(%barrier: !llvm.ptr<3>, %parity: i32) -> i1 attributes {always_inline} {
  %one = llvm.mlir.constant(1 : i32) : i32
  %sixty_three = llvm.mlir.constant(63 : i64) : i64
  %state = llvm.load %barrier atomic syncscope("workgroup") acquire {alignment = 8 : i64} : !llvm.ptr<3> -> i64
  %phase64 = llvm.lshr %state, %sixty_three : i64
  %phase = llvm.trunc %phase64 : i64 to i32
  %asked = llvm.and %parity, %one : i32
  %done = llvm.icmp "ne" %phase, %asked : i32
  llvm.return %done : i1
}

llvm.func internal @ep_bulk_load(%dst: !llvm.ptr<3>, %src: !llvm.ptr<1>, %bytes: i32, %barrier: !llvm.ptr<3>) attributes {always_inline} {
  %zero = llvm.mlir.constant(0 : i32) : i32
  %step = llvm.mlir.constant(16 : i32) : i32
  llvm.br ^loop(%zero : i32)
^loop(%at: i32):
  %more = llvm.icmp "ult" %at, %bytes : i32
  llvm.cond_br %more, ^copy, ^done
^copy:
  %from = llvm.getelementptr %src[%at] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
  %to = llvm.getelementptr %dst[%at] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  %words = llvm.load %from {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
  llvm.store %words, %to {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<3>
  %next = llvm.add %at, %step : i32
  llvm.br ^loop(%next : i32)
^done:
  %copied = llvm.sub %zero, %bytes : i32
  llvm.call @ep_mbarrier_update(%barrier, %zero, %copied) : (!llvm.ptr<3>, i32, i32) -> ()
  llvm.return
}

llvm.func internal @ep_bulk_store(%dst: !llvm.ptr<1>, %src: !llvm.ptr<3>, %bytes: i32) attributes {always_inline} {
  %zero = llvm.mlir.constant(0 : i32) : i32
  %step = llvm.mlir.constant(16 : i32) : i32
  llvm.br ^loop(%zero : i32)
^loop(%at: i32):
  %more = llvm.icmp "ult" %at, %bytes : i32
  llvm.cond_br %more, ^copy, ^done
^copy:
  %from = llvm.getelementptr %src[%at] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  %to = llvm.getelementptr %dst[%at] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
  %words = llvm.load %from {alignment = 16 : i64} : !llvm.ptr<3> -> vector<4xi32>
  llvm.store %words, %to {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
  %next = llvm.add %at, %step : i32
  llvm.br ^loop(%next : i32)
^done:
  llvm.return
}
"""
