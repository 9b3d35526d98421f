module attributes {gpu.container_module} {
  gpu.module @kernel_module {
    gpu.func @kernel(%src: !llvm.ptr<1>, %peers.table: !llvm.ptr<1>, %peers.size: i32, %flags.table: !llvm.ptr<1>, %flags.size: i32, %box.slot: !llvm.ptr<1>, %box.capacity: i32, %me: i32, %n: i32, %context: !llvm.ptr<1>) kernel attributes {ep.shared_bytes = 256 : i64} {
      %staged = "ep.shared"() {offset = 0 : i64} : () -> !llvm.ptr<3>
      %total = arith.constant 0.000000e+00 : f32
      %0 = "ep.special"() {name = "thread_idx.x"} : () -> i32
      %1 = "ep.special"() {name = "block_dim.x"} : () -> i32
      cf.br ^bb1(%0, %total : i32, f32)
    ^bb1(%i: i32, %total_0: f32):  // 2 preds: ^bb0, ^bb8
      %2 = arith.cmpi slt, %i, %n : i32
      cf.cond_br %2, ^bb2, ^bb3
    ^bb2:  // pred: ^bb1
      %3 = arith.extsi %i : i32 to i64
      %c4_i64 = arith.constant 4 : i64
      %4 = arith.muli %3, %c4_i64 : i64
      %5 = llvm.getelementptr %src[%4] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %6 = "ep.load"(%5) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> f32
      %cst = arith.constant 0.000000e+00 : f32
      %7 = arith.cmpf olt, %6, %cst : f32
      cf.cond_br %7, ^bb4, ^bb5
    ^bb3:  // pred: ^bb1
      cf.br ^bb9(%total_0 : f32)
    ^bb4:  // pred: ^bb2
      cf.br ^bb8(%total_0 : f32)
    ^bb5:  // pred: ^bb2
      %8 = arith.extsi %i : i32 to i64
      %c4_i64_1 = arith.constant 4 : i64
      %9 = arith.muli %8, %c4_i64_1 : i64
      %10 = llvm.getelementptr %src[%9] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %11 = "ep.load"(%10) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> f32
      %total_2 = arith.addf %total_0, %11 : f32
      %cst_3 = arith.constant 1.000000e+02 : f32
      %12 = arith.cmpf ogt, %total_2, %cst_3 : f32
      cf.cond_br %12, ^bb6, ^bb7
    ^bb6:  // pred: ^bb5
      cf.br ^bb9(%total_2 : f32)
    ^bb7:  // pred: ^bb5
      cf.br ^bb8(%total_2 : f32)
    ^bb8(%total_4: f32):  // 2 preds: ^bb4, ^bb7
      %13 = arith.addi %i, %1 : i32
      cf.br ^bb1(%13, %total_4 : i32, f32)
    ^bb9(%total_5: f32):  // 2 preds: ^bb3, ^bb6
      %c1_i32 = arith.constant 1 : i32
      %c4294967295_i64 = arith.constant 4294967295 : i64
      %14 = "ep.shuffle"(%total_5, %c1_i32, %c4294967295_i64) {kind = "xor", site = 0 : i32} : (f32, i32, i64) -> f32
      %15 = "ep.special"() {name = "thread_idx.x"} : () -> i32
      %16 = arith.extsi %15 : i32 to i64
      %c4_i64_6 = arith.constant 4 : i64
      %17 = arith.muli %16, %c4_i64_6 : i64
      %18 = llvm.getelementptr %staged[%17] : (!llvm.ptr<3>, i64) -> !llvm.ptr<3>, i8
      "ep.store"(%14, %18) {cache = "default", order = "plain", scope = "none"} : (f32, !llvm.ptr<3>) -> ()
      "ep.barrier"() {site = 1 : i32} : () -> ()
      %v = "ep.load"(%src) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> vector<4xf32>
      %19 = arith.extsi %me : i32 to i64
      %c8_i64 = arith.constant 8 : i64
      %20 = arith.muli %19, %c8_i64 : i64
      %21 = llvm.getelementptr %peers.table[%20] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %22 = "ep.load"(%21) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> i64
      %23 = llvm.inttoptr %22 : i64 to !llvm.ptr<1>
      "ep.store"(%v, %23) {cache = "default", order = "plain", scope = "none"} : (vector<4xf32>, !llvm.ptr<1>) -> ()
      %c1_i32_7 = arith.constant 1 : i32
      %c64_i32 = arith.constant 64 : i32
      "ep.named_barrier"(%c1_i32_7, %c64_i32) {site = 2 : i32} : (i32, i32) -> ()
      %c4294967295_i64_8 = arith.constant 4294967295 : i64
      %24 = "ep.elect"(%c4294967295_i64_8) {site = 3 : i32} : (i64) -> i1
      cf.cond_br %24, ^bb10, ^bb11
    ^bb10:  // pred: ^bb9
      %c0_i32 = arith.constant 0 : i32
      %25 = arith.cmpi sgt, %box.capacity, %c0_i32 : i32
      cf.br ^bb12(%25 : i1)
    ^bb11:  // pred: ^bb9
      %false = arith.constant false
      cf.br ^bb12(%false : i1)
    ^bb12(%26: i1):  // 2 preds: ^bb10, ^bb11
      cf.cond_br %26, ^bb13, ^bb14
    ^bb13:  // pred: ^bb12
      %c1_i32_9 = arith.constant 1 : i32
      %ticket = "ep.atomic_rmw"(%box.slot, %c1_i32_9) {op = "add", order = "acq_rel", scope = "device"} : (!llvm.ptr<1>, i32) -> i32
      "ep.fence"() {order = "release", scope = "system"} : () -> ()
      %c3_i32 = arith.constant 3 : i32
      %27 = arith.cmpi eq, %ticket, %c3_i32 : i32
      cf.cond_br %27, ^bb15, ^bb16
    ^bb14:  // pred: ^bb12
      cf.br ^bb18
    ^bb15:  // pred: ^bb13
      %28 = arith.extsi %me : i32 to i64
      %c8_i64_10 = arith.constant 8 : i64
      %29 = arith.muli %28, %c8_i64_10 : i64
      %30 = llvm.getelementptr %flags.table[%29] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %31 = "ep.load"(%30) {cache = "default", order = "plain", scope = "none"} : (!llvm.ptr<1>) -> i64
      %32 = llvm.inttoptr %31 : i64 to !llvm.ptr<1>
      %c7_i32 = arith.constant 7 : i32
      "ep.store"(%c7_i32, %32) {cache = "default", order = "release", scope = "system"} : (i32, !llvm.ptr<1>) -> ()
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
