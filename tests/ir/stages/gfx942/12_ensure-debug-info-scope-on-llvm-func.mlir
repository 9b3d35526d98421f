module attributes {gpu.container_module} {
  gpu.module @kernel_module {
    llvm.mlir.global external @ep_shared() {addr_space = 3 : i32, alignment = 128 : i64} : !llvm.array<0 x i8>
    llvm.module_flags [#llvm.mlir.module_flag<error, "amdhsa_code_object_version", 500 : i32>]
    llvm.func internal @ep_lane_id() -> i32 attributes {always_inline} {
      %0 = llvm.mlir.constant(-1 : i32) : i32
      %1 = llvm.mlir.constant(0 : i32) : i32
      %2 = llvm.call_intrinsic "llvm.amdgcn.mbcnt.lo"(%0, %1) : (i32, i32) -> i32
      %3 = llvm.call_intrinsic "llvm.amdgcn.mbcnt.hi"(%0, %2) : (i32, i32) -> i32
      llvm.return %3 : i32
    }
    llvm.func internal @ep_block_barrier() attributes {always_inline} {
      llvm.call @ep_release_block() : () -> ()
      llvm.call_intrinsic "llvm.amdgcn.s.barrier"() : () -> ()
      llvm.fence syncscope("workgroup") acquire
      llvm.return
    }
    llvm.func internal @ep_sleep(%arg0: i32) attributes {always_inline} {
      %0 = llvm.mlir.constant(1 : i32) : i32
      %1 = llvm.mlir.constant(10 : i32) : i32
      %2 = llvm.udiv %arg0, %1 : i32
      %3 = llvm.zext %2 : i32 to i64
      %4 = llvm.call_intrinsic "llvm.readsteadycounter"() : () -> i64
      llvm.br ^bb1
    ^bb1:  // 2 preds: ^bb0, ^bb1
      llvm.call_intrinsic "llvm.amdgcn.s.sleep"(%0) : (i32) -> ()
      %5 = llvm.call_intrinsic "llvm.readsteadycounter"() : () -> i64
      %6 = llvm.sub %5, %4 : i64
      %7 = llvm.icmp "ult" %6, %3 : i64
      llvm.cond_br %7, ^bb1, ^bb2
    ^bb2:  // pred: ^bb1
      llvm.return
    }
    llvm.mlir.global internal @ep_named_barriers() {addr_space = 3 : i32, alignment = 64 : i64} : !llvm.array<16 x i32> {
      %0 = llvm.mlir.poison : !llvm.array<16 x i32>
      llvm.return %0 : !llvm.array<16 x i32>
    }
    llvm.func internal @ep_named_barriers_clear() attributes {always_inline} {
      %0 = llvm.mlir.constant(0 : i32) : i32
      %1 = llvm.mlir.constant(dense<0> : vector<16xi32>) : vector<16xi32>
      %2 = llvm.mlir.addressof @ep_named_barriers : !llvm.ptr<3>
      %3 = llvm.call_intrinsic "llvm.amdgcn.workitem.id.x"() : () -> i32
      %4 = llvm.call_intrinsic "llvm.amdgcn.workitem.id.y"() : () -> i32
      %5 = llvm.call_intrinsic "llvm.amdgcn.workitem.id.z"() : () -> i32
      %6 = llvm.or %3, %4 : i32
      %7 = llvm.or %6, %5 : i32
      %8 = llvm.icmp "eq" %7, %0 : i32
      llvm.cond_br %8, ^bb1, ^bb2
    ^bb1:  // pred: ^bb0
      llvm.store %1, %2 {alignment = 64 : i64} : vector<16xi32>, !llvm.ptr<3>
      llvm.br ^bb2
    ^bb2:  // 2 preds: ^bb0, ^bb1
      llvm.call @ep_block_barrier() : () -> ()
      llvm.return
    }
    llvm.func internal @ep_named_barrier(%arg0: i32, %arg1: i32, %arg2: i1) attributes {always_inline} {
      %0 = llvm.mlir.constant(0 : i32) : i32
      %1 = llvm.mlir.constant(1 : i32) : i32
      %2 = llvm.mlir.constant(0 : i16) : i16
      %3 = llvm.mlir.constant(16 : i32) : i32
      %4 = llvm.mlir.constant(65535 : i32) : i32
      %5 = llvm.mlir.constant(65536 : i32) : i32
      %6 = llvm.mlir.constant(true) : i1
      %7 = llvm.mlir.addressof @ep_named_barriers : !llvm.ptr<3>
      %8 = llvm.getelementptr %7[%arg0] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
      llvm.call @ep_release_block() : () -> ()
      %9 = llvm.call_intrinsic "llvm.amdgcn.ballot.i64"(%6) : (i1) -> i64
      %10 = "llvm.intr.cttz"(%9) <{is_zero_poison = false}> : (i64) -> i64
      %11 = llvm.trunc %10 : i64 to i32
      %12 = llvm.call @ep_lane_id() : () -> i32
      %13 = llvm.icmp "eq" %12, %11 : i32
      llvm.cond_br %13, ^bb1, ^bb3(%0 : i32)
    ^bb1:  // pred: ^bb0
      %14 = llvm.atomicrmw add %8, %1 syncscope("workgroup") monotonic : !llvm.ptr<3>, i32
      %15 = llvm.and %14, %4 : i32
      %16 = llvm.lshr %14, %3 : i32
      %17 = llvm.icmp "uge" %15, %arg1 : i32
      %18 = llvm.zext %17 : i1 to i32
      %19 = llvm.add %16, %18 : i32
      %20 = llvm.add %19, %1 : i32
      %21 = llvm.add %15, %1 : i32
      %22 = llvm.icmp "eq" %21, %arg1 : i32
      llvm.cond_br %22, ^bb2, ^bb3(%20 : i32)
    ^bb2:  // pred: ^bb1
      %23 = llvm.sub %5, %arg1 : i32
      %24 = llvm.atomicrmw add %8, %23 syncscope("workgroup") monotonic : !llvm.ptr<3>, i32
      llvm.br ^bb3(%20 : i32)
    ^bb3(%25: i32):  // 3 preds: ^bb0, ^bb1, ^bb2
      llvm.cond_br %arg2, ^bb4, ^bb8
    ^bb4:  // pred: ^bb3
      %26 = llvm.call_intrinsic "llvm.amdgcn.readfirstlane.i32"(%25) : (i32) -> i32
      llvm.br ^bb5
    ^bb5:  // 2 preds: ^bb4, ^bb6
      %27 = llvm.load %8 atomic syncscope("workgroup") monotonic {alignment = 4 : i64} : !llvm.ptr<3> -> i32
      %28 = llvm.lshr %27, %3 : i32
      %29 = llvm.sub %28, %26 : i32
      %30 = llvm.trunc %29 : i32 to i16
      %31 = llvm.icmp "sge" %30, %2 : i16
      llvm.cond_br %31, ^bb7, ^bb6
    ^bb6:  // pred: ^bb5
      llvm.call_intrinsic "llvm.amdgcn.s.sleep"(%1) : (i32) -> ()
      llvm.br ^bb5
    ^bb7:  // pred: ^bb5
      llvm.fence syncscope("workgroup") acquire
      llvm.br ^bb8
    ^bb8:  // 2 preds: ^bb3, ^bb7
      llvm.return
    }
    llvm.func internal @ep_mbarrier_init(%arg0: !llvm.ptr<3>, %arg1: i32) attributes {always_inline} {
      %0 = llvm.mlir.constant(15 : i32) : i32
      %1 = llvm.mlir.constant(32 : i64) : i64
      %2 = llvm.shl %arg1, %0 : i32
      %3 = llvm.or %2, %arg1 : i32
      %4 = llvm.zext %3 : i32 to i64
      %5 = llvm.shl %4, %1 : i64
      llvm.call @ep_release_block() : () -> ()
      llvm.store %5, %arg0 atomic syncscope("workgroup") monotonic {alignment = 8 : i64} : i64, !llvm.ptr<3>
      llvm.return
    }
    llvm.func internal @ep_mbarrier_update(%arg0: !llvm.ptr<3>, %arg1: i32, %arg2: i32) attributes {always_inline} {
      %0 = llvm.mlir.constant(0 : i32) : i32
      %1 = llvm.mlir.constant(15 : i32) : i32
      %2 = llvm.mlir.constant(32767 : i32) : i32
      %3 = llvm.mlir.constant(-2147483648 : i32) : i32
      %4 = llvm.mlir.constant(32 : i64) : i64
      llvm.call @ep_release_block() : () -> ()
      %5 = llvm.load %arg0 atomic syncscope("workgroup") monotonic {alignment = 8 : i64} : !llvm.ptr<3> -> i64
      llvm.br ^bb1(%5 : i64)
    ^bb1(%6: i64):  // 2 preds: ^bb0, ^bb1
      %7 = llvm.trunc %6 : i64 to i32
      %8 = llvm.lshr %6, %4 : i64
      %9 = llvm.trunc %8 : i64 to i32
      %10 = llvm.add %7, %arg2 : i32
      %11 = llvm.sub %9, %arg1 : i32
      %12 = llvm.and %11, %2 : i32
      %13 = llvm.or %10, %12 : i32
      %14 = llvm.icmp "eq" %13, %0 : i32
      %15 = llvm.lshr %11, %1 : i32
      %16 = llvm.and %15, %2 : i32
      %17 = llvm.or %11, %16 : i32
      %18 = llvm.xor %17, %3 : i32
      %19 = llvm.select %14, %18, %11 : i1, i32
      %20 = llvm.zext %10 : i32 to i64
      %21 = llvm.zext %19 : i32 to i64
      %22 = llvm.shl %21, %4 : i64
      %23 = llvm.or %22, %20 : i64
      %24 = llvm.cmpxchg %arg0, %6, %23 syncscope("workgroup") monotonic monotonic : !llvm.ptr<3>, i64
      %25 = llvm.extractvalue %24[0] : !llvm.struct<(i64, i1)> 
      %26 = llvm.extractvalue %24[1] : !llvm.struct<(i64, i1)> 
      llvm.cond_br %26, ^bb2, ^bb1(%25 : i64)
    ^bb2:  // pred: ^bb1
      llvm.return
    }
    llvm.func internal @ep_mbarrier_arrive(%arg0: !llvm.ptr<3>) attributes {always_inline} {
      %0 = llvm.mlir.constant(1 : i32) : i32
      %1 = llvm.mlir.constant(0 : i32) : i32
      llvm.call @ep_mbarrier_update(%arg0, %0, %1) : (!llvm.ptr<3>, i32, i32) -> ()
      llvm.return
    }
    llvm.func internal @ep_mbarrier_expect(%arg0: !llvm.ptr<3>, %arg1: i32) attributes {always_inline} {
      %0 = llvm.mlir.constant(1 : i32) : i32
      llvm.call @ep_mbarrier_update(%arg0, %0, %arg1) : (!llvm.ptr<3>, i32, i32) -> ()
      llvm.return
    }
    llvm.func internal @ep_mbarrier_test(%arg0: !llvm.ptr<3>, %arg1: i32) -> i1 attributes {always_inline} {
      %0 = llvm.mlir.constant(1 : i32) : i32
      %1 = llvm.mlir.constant(63 : i64) : i64
      %2 = llvm.load %arg0 atomic syncscope("workgroup") acquire {alignment = 8 : i64} : !llvm.ptr<3> -> i64
      %3 = llvm.lshr %2, %1 : i64
      %4 = llvm.trunc %3 : i64 to i32
      %5 = llvm.and %arg1, %0 : i32
      %6 = llvm.icmp "ne" %4, %5 : i32
      llvm.return %6 : i1
    }
    llvm.func internal @ep_bulk_load(%arg0: !llvm.ptr<3>, %arg1: !llvm.ptr<1>, %arg2: i32, %arg3: !llvm.ptr<3>) attributes {always_inline} {
      %0 = llvm.mlir.constant(0 : i32) : i32
      %1 = llvm.mlir.constant(16 : i32) : i32
      llvm.br ^bb1(%0 : i32)
    ^bb1(%2: i32):  // 2 preds: ^bb0, ^bb2
      %3 = llvm.icmp "ult" %2, %arg2 : i32
      llvm.cond_br %3, ^bb2, ^bb3
    ^bb2:  // pred: ^bb1
      %4 = llvm.getelementptr %arg1[%2] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
      %5 = llvm.getelementptr %arg0[%2] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
      %6 = llvm.load %4 {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
      llvm.store %6, %5 {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<3>
      %7 = llvm.add %2, %1 : i32
      llvm.br ^bb1(%7 : i32)
    ^bb3:  // pred: ^bb1
      %8 = llvm.sub %0, %arg2 : i32
      llvm.call @ep_mbarrier_update(%arg3, %0, %8) : (!llvm.ptr<3>, i32, i32) -> ()
      llvm.return
    }
    llvm.func internal @ep_bulk_store(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<3>, %arg2: i32) attributes {always_inline} {
      %0 = llvm.mlir.constant(0 : i32) : i32
      %1 = llvm.mlir.constant(16 : i32) : i32
      llvm.br ^bb1(%0 : i32)
    ^bb1(%2: i32):  // 2 preds: ^bb0, ^bb2
      %3 = llvm.icmp "ult" %2, %arg2 : i32
      llvm.cond_br %3, ^bb2, ^bb3
    ^bb2:  // pred: ^bb1
      %4 = llvm.getelementptr %arg1[%2] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
      %5 = llvm.getelementptr %arg0[%2] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
      %6 = llvm.load %4 {alignment = 16 : i64} : !llvm.ptr<3> -> vector<4xi32>
      llvm.store %6, %5 {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
      %7 = llvm.add %2, %1 : i32
      llvm.br ^bb1(%7 : i32)
    ^bb3:  // pred: ^bb1
      llvm.return
    }
    llvm.func internal @ep_release_block() attributes {always_inline} {
      %0 = llvm.mlir.constant(3952 : i32) : i32
      llvm.fence syncscope("workgroup") release
      llvm.call_intrinsic "llvm.amdgcn.s.waitcnt"(%0) : (i32) -> ()
      llvm.return
    }
    llvm.func @publish(%data: !llvm.ptr<1>, %flag: !llvm.ptr<1>, %n: i32, %context: !llvm.ptr<1>) attributes {rocdl.flat_work_group_size = "1,128", rocdl.kernel} {
      %0 = llvm.mlir.constant(3952 : i32) : i32
      %1 = llvm.mlir.constant(1 : i32) : i32
      %2 = llvm.mlir.constant(0 : i32) : i32
      %3 = llvm.mlir.constant(2.000000e+00 : f32) : f32
      %4 = llvm.mlir.constant(4 : i64) : i64
      %5 = llvm.call_intrinsic "llvm.amdgcn.workitem.id.x"() : () -> i32
      %6 = llvm.icmp "slt" %5, %n : i32
      llvm.cond_br %6, ^bb1, ^bb2
    ^bb1:  // pred: ^bb0
      %7 = llvm.sext %5 : i32 to i64
      %8 = llvm.mul %7, %4 : i64
      %9 = llvm.getelementptr %data[%8] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %10 = llvm.load %9 {alignment = 4 : i64} : !llvm.ptr<1> -> f32
      %11 = llvm.fmul %10, %3 : f32
      %12 = llvm.sext %5 : i32 to i64
      %13 = llvm.mul %12, %4 : i64
      %14 = llvm.getelementptr %data[%13] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      llvm.store %11, %14 {alignment = 4 : i64} : f32, !llvm.ptr<1>
      llvm.br ^bb3
    ^bb2:  // pred: ^bb0
      llvm.br ^bb3
    ^bb3:  // 2 preds: ^bb1, ^bb2
      llvm.call @ep_block_barrier() : () -> ()
      %15 = llvm.icmp "eq" %5, %2 : i32
      llvm.cond_br %15, ^bb4, ^bb5
    ^bb4:  // pred: ^bb3
      llvm.fence release
      llvm.call_intrinsic "llvm.amdgcn.s.waitcnt"(%0) : (i32) -> ()
      llvm.store %1, %flag atomic monotonic {alignment = 4 : i64} : i32, !llvm.ptr<1>
      llvm.br ^bb6
    ^bb5:  // pred: ^bb3
      llvm.br ^bb6
    ^bb6:  // 2 preds: ^bb4, ^bb5
      llvm.return
    }
  }
}
