module attributes {gpu.container_module} {
  gpu.module @kernel_module {
    gpu.func @kernel(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>, %arg2: i32, %arg3: !llvm.ptr<1>, %arg4: i32, %arg5: !llvm.ptr<1>, %arg6: i32, %arg7: i32, %arg8: i32, %arg9: !llvm.ptr<1>) kernel attributes {ep.shared_bytes = 256 : i64} {
      %0 = "ep.shared"() {offset = 0 : i64} : () -> !llvm.ptr<3>
      %cst = arith.constant 0.000000e+00 : f32
      %1 = "ep.special"() {name = "thread_idx.x"} : () -> i32
      %2 = "ep.special"() {name = "block_dim.x"} : () -> i32
      cf.br ^bb1(%1, %cst : i32, f32)
    ^bb1(%3: i32, %4: f32):  // 2 preds: ^bb0, ^bb8
      %5 = arith.cmpi slt, %3, %arg8 : i32
      cf.cond_br %5, ^bb2, ^bb3
    ^bb2:  // pred: ^bb1
      %6 = arith.extsi %3 : i32 to i64
      %c4_i64 = arith.constant 4 : i64
      %7 = arith.muli %6, %c4_i64 : i64
      %8 = llvm.getelementptr %arg0[%7] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %9 = "ep.load"(%8) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> f32
      %cst_0 = arith.constant 0.000000e+00 : f32
      %10 = arith.cmpf olt, %9, %cst_0 : f32
      cf.cond_br %10, ^bb4, ^bb5
    ^bb3:  // pred: ^bb1
      cf.br ^bb9(%4 : f32)
    ^bb4:  // pred: ^bb2
      cf.br ^bb8(%4 : f32)
    ^bb5:  // pred: ^bb2
      %11 = arith.extsi %3 : i32 to i64
      %c4_i64_1 = arith.constant 4 : i64
      %12 = arith.muli %11, %c4_i64_1 : i64
      %13 = llvm.getelementptr %arg0[%12] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %14 = "ep.load"(%13) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> f32
      %15 = arith.addf %4, %14 : f32
      %cst_2 = arith.constant 1.000000e+02 : f32
      %16 = arith.cmpf ogt, %15, %cst_2 : f32
      cf.cond_br %16, ^bb6, ^bb7
    ^bb6:  // pred: ^bb5
      cf.br ^bb9(%15 : f32)
    ^bb7:  // pred: ^bb5
      cf.br ^bb8(%15 : f32)
    ^bb8(%17: f32):  // 2 preds: ^bb4, ^bb7
      %18 = arith.addi %3, %2 : i32
      cf.br ^bb1(%18, %17 : i32, f32)
    ^bb9(%19: f32):  // 2 preds: ^bb3, ^bb6
      %c1_i32 = arith.constant 1 : i32
      %c4294967295_i64 = arith.constant 4294967295 : i64
      %20 = "ep.shuffle"(%19, %c1_i32, %c4294967295_i64) {kind = "xor", site = 0 : i32} : (f32, i32, i64) -> f32
      %21 = "ep.special"() {name = "thread_idx.x"} : () -> i32
      %22 = arith.extsi %21 : i32 to i64
      %c4_i64_3 = arith.constant 4 : i64
      %23 = arith.muli %22, %c4_i64_3 : i64
      %24 = llvm.getelementptr %0[%23] : (!llvm.ptr<3>, i64) -> !llvm.ptr<3>, i8
      "ep.store"(%20, %24) {cache = "default", order = "plain", scope = "none"} : (f32, !llvm.ptr<3>) -> ()
      "ep.barrier"() {site = 1 : i32} : () -> ()
      %25 = "ep.load"(%arg0) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> vector<4xf32>
      %26 = arith.extsi %arg7 : i32 to i64
      %c8_i64 = arith.constant 8 : i64
      %27 = arith.muli %26, %c8_i64 : i64
      %28 = llvm.getelementptr %arg1[%27] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %29 = "ep.load"(%28) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> i64
      %30 = llvm.inttoptr %29 : i64 to !llvm.ptr<1>
      "ep.store"(%25, %30) {cache = "default", order = "plain", scope = "none"} : (vector<4xf32>, !llvm.ptr<1>) -> ()
      %c1_i32_4 = arith.constant 1 : i32
      %c64_i32 = arith.constant 64 : i32
      "ep.named_barrier"(%c1_i32_4, %c64_i32) {site = 2 : i32} : (i32, i32) -> ()
      %c4294967295_i64_5 = arith.constant 4294967295 : i64
      %31 = "ep.elect"(%c4294967295_i64_5) {site = 3 : i32} : (i64) -> i1
      cf.cond_br %31, ^bb10, ^bb11
    ^bb10:  // pred: ^bb9
      %c0_i32 = arith.constant 0 : i32
      %32 = arith.cmpi sgt, %arg6, %c0_i32 : i32
      cf.br ^bb12(%32 : i1)
    ^bb11:  // pred: ^bb9
      %false = arith.constant false
      cf.br ^bb12(%false : i1)
    ^bb12(%33: i1):  // 2 preds: ^bb10, ^bb11
      cf.cond_br %33, ^bb13, ^bb14
    ^bb13:  // pred: ^bb12
      %c1_i32_6 = arith.constant 1 : i32
      %34 = "ep.atomic_rmw"(%arg5, %c1_i32_6) {op = "add", order = "acq_rel", scope = "device"} : (!llvm.ptr<1>, i32) -> i32
      "ep.fence"() {order = "release", scope = "system"} : () -> ()
      %c3_i32 = arith.constant 3 : i32
      %35 = arith.cmpi eq, %34, %c3_i32 : i32
      cf.cond_br %35, ^bb15, ^bb16
    ^bb14:  // pred: ^bb12
      cf.br ^bb18
    ^bb15:  // pred: ^bb13
      %36 = arith.extsi %arg7 : i32 to i64
      %c8_i64_7 = arith.constant 8 : i64
      %37 = arith.muli %36, %c8_i64_7 : i64
      %38 = llvm.getelementptr %arg3[%37] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %39 = "ep.load"(%38) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> i64
      %40 = llvm.inttoptr %39 : i64 to !llvm.ptr<1>
      %c7_i32 = arith.constant 7 : i32
      "ep.store"(%c7_i32, %40) {cache = "default", order = "release", scope = "system"} : (i32, !llvm.ptr<1>) -> ()
      cf.br ^bb17
    ^bb16:  // pred: ^bb13
      cf.br ^bb17
    ^bb17:  // 2 preds: ^bb15, ^bb16
      cf.br ^bb18
    ^bb18:  // 2 preds: ^bb14, ^bb17
      gpu.return
    }
  }
}
