module attributes {gpu.container_module} {
  gpu.module @kernel_module {
    llvm.mlir.global external @ep_shared() {addr_space = 3 : i32, alignment = 128 : i64} : !llvm.array<0 x i8>
    llvm.func @publish(%data: !llvm.ptr<1>, %flag: !llvm.ptr<1>, %n: i32, %context: !llvm.ptr<1>) attributes {nvvm.kernel, nvvm.maxntid = array<i32: 128>, nvvm.minctasm = 1 : i32} {
      %0 = llvm.mlir.constant(1 : i32) : i32
      %1 = llvm.mlir.constant(0 : i32) : i32
      %2 = llvm.mlir.constant(0 : i32) : i32
      %3 = llvm.mlir.constant(2.000000e+00 : f32) : f32
      %4 = llvm.mlir.constant(4 : i64) : i64
      %i = llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.tid.x"() : () -> i32
      %5 = llvm.icmp "slt" %i, %n : i32
      llvm.cond_br %5, ^bb1, ^bb2
    ^bb1:  // pred: ^bb0
      %6 = llvm.sext %i : i32 to i64
      %7 = llvm.mul %6, %4 : i64
      %8 = llvm.getelementptr %data[%7] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      %9 = llvm.load %8 {alignment = 4 : i64} : !llvm.ptr<1> -> f32
      %y = llvm.fmul %9, %3 : f32
      %10 = llvm.sext %i : i32 to i64
      %11 = llvm.mul %10, %4 : i64
      %12 = llvm.getelementptr %data[%11] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
      llvm.store %y, %12 {alignment = 4 : i64} : f32, !llvm.ptr<1>
      llvm.br ^bb3
    ^bb2:  // pred: ^bb0
      llvm.br ^bb3
    ^bb3:  // 2 preds: ^bb1, ^bb2
      llvm.call_intrinsic "llvm.nvvm.barrier.cta.sync.all"(%2) : (i32) -> ()
      %13 = llvm.icmp "eq" %i, %1 : i32
      llvm.cond_br %13, ^bb4, ^bb5
    ^bb4:  // pred: ^bb3
      llvm.inline_asm has_side_effects "st.release.sys.global.b32 [$0], $1;", "l,r,~{memory}" %flag, %0 : (!llvm.ptr<1>, i32) -> ()
      llvm.br ^bb6
    ^bb5:  // pred: ^bb3
      llvm.br ^bb6
    ^bb6:  // 2 preds: ^bb4, ^bb5
      llvm.return
    }
  }
}
