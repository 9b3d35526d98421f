module attributes {gpu.container_module} {
  gpu.module @kernel_module {
    llvm.mlir.global external @ep_shared() {addr_space = 3 : i32, alignment = 128 : i64} : !llvm.array<0 x i8>
    llvm.func @publish(%data: !llvm.ptr<1>, %flag: !llvm.ptr<1>, %n: i32, %context: !llvm.ptr<1>) attributes {nvvm.kernel, nvvm.maxntid = array<i32: 128>, nvvm.minctasm = 1 : i32} {
      %c1_i32 = arith.constant 1 : i32
      %c0_i32 = arith.constant 0 : i32
      %0 = llvm.mlir.constant(0 : i32) : i32
      %cst = arith.constant 2.000000e+00 : f32
      %c4_i64 = arith.constant 4 : i64
      %i = llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.tid.x"() : () -> i32
      %1 = arith.cmpi slt, %i, %n : i32
      cf.cond_br %1, ^bb1, ^bb2
    ^bb1:  // pred: ^bb0
      %2 = arith.extsi %i : i32 to i64
      %3 = arith.muli %2, %c4_i64 : i64
      %4 = llvm.getelementptr %data[%3] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %5 = llvm.load %4 {alignment = 4 : i64} : !llvm.ptr<1> -> f32
      %y = arith.mulf %5, %cst : f32
      %6 = arith.extsi %i : i32 to i64
      %7 = arith.muli %6, %c4_i64 : i64
      %8 = llvm.getelementptr %data[%7] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      llvm.store %y, %8 {alignment = 4 : i64} : f32, !llvm.ptr<1>
      cf.br ^bb3
    ^bb2:  // pred: ^bb0
      cf.br ^bb3
    ^bb3:  // 2 preds: ^bb1, ^bb2
      llvm.call_intrinsic "llvm.nvvm.barrier.cta.sync.all"(%0) : (i32) -> ()
      %9 = arith.cmpi eq, %i, %c0_i32 : i32
      cf.cond_br %9, ^bb4, ^bb5
    ^bb4:  // pred: ^bb3
      llvm.inline_asm has_side_effects "st.release.sys.global.b32 [$0], $1;", "l,r,~{memory}" %flag, %c1_i32 : (!llvm.ptr<1>, i32) -> ()
      cf.br ^bb6
    ^bb5:  // pred: ^bb3
      cf.br ^bb6
    ^bb6:  // 2 preds: ^bb4, ^bb5
      llvm.return
    }
  }
}
