module {
  llvm.func @malloc(i64) -> !llvm.ptr
  llvm.func @free(!llvm.ptr)
  llvm.func @publish(%arg0: !llvm.ptr, %arg1: !llvm.ptr) -> !llvm.ptr attributes {passthrough = ["presplitcoroutine"]} {
    %0 = llvm.mlir.constant(11 : i64) : i64
    %1 = llvm.mlir.constant(1 : i8) : i8
    %c1_i32 = arith.constant 1 : i32
    %c0_i32 = arith.constant 0 : i32
    %2 = llvm.mlir.constant(4 : i64) : i64
    %3 = llvm.mlir.constant(0 : i64) : i64
    %cst = arith.constant 2.000000e+00 : f32
    %c4_i64 = arith.constant 4 : i64
    %4 = llvm.mlir.constant(0 : i8) : i8
    %5 = llvm.mlir.constant(0 : i32) : i32
    %6 = llvm.mlir.zero : !llvm.ptr
    %7 = llvm.mlir.constant(false) : i1
    %8 = llvm.mlir.constant(true) : i1
    %9 = llvm.mlir.none : !llvm.token
    %10 = llvm.intr.coro.id %5, %6, %6, %6 : (i32, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> !llvm.token
    %11 = llvm.intr.coro.size : i64
    %12 = llvm.call @malloc(%11) : (i64) -> !llvm.ptr
    %13 = llvm.intr.coro.begin %10, %12 : (!llvm.token, !llvm.ptr) -> !llvm.ptr
    %14 = llvm.intr.coro.suspend %9, %7 : i8
    %15 = llvm.icmp "eq" %14, %4 : i8
    llvm.cond_br %15, ^bb13, ^bb10(%14 : i8)
  ^bb1:  // pred: ^bb13
    %i = llvm.getelementptr %arg1[72] : (!llvm.ptr) -> !llvm.ptr, i8
    %i_0 = llvm.load %i : !llvm.ptr -> i64
    %i_1 = llvm.trunc %i_0 : i64 to i32
    %16 = arith.cmpi slt, %i_1, %40 : i32
    cf.cond_br %16, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %17 = arith.extsi %i_1 : i32 to i64
    %18 = arith.muli %17, %c4_i64 : i64
    %19 = llvm.getelementptr %36[%18] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
    %20 = llvm.load %19 : !llvm.ptr<1> -> f32
    %y = arith.mulf %20, %cst : f32
    %21 = arith.extsi %i_1 : i32 to i64
    %22 = arith.muli %21, %c4_i64 : i64
    %23 = llvm.getelementptr %36[%22] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
    llvm.store %y, %23 : f32, !llvm.ptr<1>
    cf.br ^bb4
  ^bb3:  // pred: ^bb1
    cf.br ^bb4
  ^bb4:  // 2 preds: ^bb2, ^bb3
    %24 = llvm.getelementptr %arg1[16] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %3, %24 : i64, !llvm.ptr
    %25 = llvm.getelementptr %arg1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %2, %25 : i64, !llvm.ptr
    %26 = llvm.intr.coro.suspend %9, %7 : i8
    %27 = llvm.icmp "eq" %26, %4 : i8
    llvm.cond_br %27, ^bb5, ^bb10(%26 : i8)
  ^bb5:  // pred: ^bb4
    %28 = llvm.getelementptr %arg1[56] : (!llvm.ptr) -> !llvm.ptr, i8
    %29 = llvm.load %28 : !llvm.ptr -> i64
    %30 = llvm.icmp "eq" %29, %3 : i64
    llvm.cond_br %30, ^bb6, ^bb14
  ^bb6:  // pred: ^bb5
    %31 = arith.cmpi eq, %i_1, %c0_i32 : i32
    cf.cond_br %31, ^bb7, ^bb8
  ^bb7:  // pred: ^bb6
    llvm.store %c1_i32, %38 : i32, !llvm.ptr<1>
    cf.br ^bb9
  ^bb8:  // pred: ^bb6
    cf.br ^bb9
  ^bb9:  // 2 preds: ^bb7, ^bb8
    llvm.br ^bb14
  ^bb10(%32: i8):  // 3 preds: ^bb0, ^bb4, ^bb14
    %33 = llvm.icmp "eq" %32, %1 : i8
    llvm.cond_br %33, ^bb11, ^bb12
  ^bb11:  // pred: ^bb10
    %34 = llvm.intr.coro.free %10, %13 : (!llvm.token, !llvm.ptr) -> !llvm.ptr
    llvm.call @free(%34) : (!llvm.ptr) -> ()
    llvm.br ^bb12
  ^bb12:  // 2 preds: ^bb10, ^bb11
    %35 = llvm.intr.coro.end %13, %7, %9 : (!llvm.ptr, i1, !llvm.token) -> i1
    llvm.return %13 : !llvm.ptr
  ^bb13:  // pred: ^bb0
    %36 = llvm.load %arg0 : !llvm.ptr -> !llvm.ptr<1>
    %37 = llvm.getelementptr %arg0[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %38 = llvm.load %37 : !llvm.ptr -> !llvm.ptr<1>
    %39 = llvm.getelementptr %arg0[16] : (!llvm.ptr) -> !llvm.ptr, i8
    %40 = llvm.load %39 : !llvm.ptr -> i32
    llvm.br ^bb1
  ^bb14:  // 2 preds: ^bb5, ^bb9
    %41 = llvm.getelementptr %arg1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %0, %41 : i64, !llvm.ptr
    %42 = llvm.intr.coro.suspend %9, %8 : i8
    llvm.br ^bb10(%42 : i8)
  }
}
