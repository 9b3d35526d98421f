module {
  llvm.func @malloc(i64) -> !llvm.ptr
  llvm.func @free(!llvm.ptr)
  llvm.func @publish(%arg0: !llvm.ptr, %arg1: !llvm.ptr) -> !llvm.ptr attributes {passthrough = ["presplitcoroutine"]} {
    %0 = llvm.mlir.constant(11 : i64) : i64
    %1 = llvm.mlir.constant(1 : i8) : i8
    %2 = llvm.mlir.constant(1 : i32) : i32
    %3 = llvm.mlir.constant(0 : i32) : i32
    %4 = llvm.mlir.constant(4 : i64) : i64
    %5 = llvm.mlir.constant(0 : i64) : i64
    %6 = llvm.mlir.constant(2.000000e+00 : f32) : f32
    %7 = llvm.mlir.constant(4 : i64) : i64
    %8 = llvm.mlir.constant(0 : i8) : i8
    %9 = llvm.mlir.constant(0 : i32) : i32
    %10 = llvm.mlir.zero : !llvm.ptr
    %11 = llvm.mlir.constant(false) : i1
    %12 = llvm.mlir.constant(true) : i1
    %13 = llvm.mlir.none : !llvm.token
    %14 = llvm.intr.coro.id %9, %10, %10, %10 : (i32, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> !llvm.token
    %15 = llvm.intr.coro.size : i64
    %16 = llvm.call @malloc(%15) : (i64) -> !llvm.ptr
    %17 = llvm.intr.coro.begin %14, %16 : (!llvm.token, !llvm.ptr) -> !llvm.ptr
    %18 = llvm.intr.coro.suspend %13, %11 : i8
    %19 = llvm.icmp "eq" %18, %8 : i8
    llvm.cond_br %19, ^bb13, ^bb10(%18 : i8)
  ^bb1:  // pred: ^bb13
    %i = llvm.getelementptr %arg1[72] : (!llvm.ptr) -> !llvm.ptr, i8
    %i_0 = llvm.load %i : !llvm.ptr -> i64
    %i_1 = llvm.trunc %i_0 : i64 to i32
    %20 = llvm.icmp "slt" %i_1, %44 : i32
    llvm.cond_br %20, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %21 = llvm.sext %i_1 : i32 to i64
    %22 = llvm.mul %21, %7 : i64
    %23 = llvm.getelementptr %40[%22] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
    %24 = llvm.load %23 : !llvm.ptr<1> -> f32
    %y = llvm.fmul %24, %6 : f32
    %25 = llvm.sext %i_1 : i32 to i64
    %26 = llvm.mul %25, %7 : i64
    %27 = llvm.getelementptr %40[%26] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
    llvm.store %y, %27 : f32, !llvm.ptr<1>
    llvm.br ^bb4
  ^bb3:  // pred: ^bb1
    llvm.br ^bb4
  ^bb4:  // 2 preds: ^bb2, ^bb3
    %28 = llvm.getelementptr %arg1[16] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %5, %28 : i64, !llvm.ptr
    %29 = llvm.getelementptr %arg1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %4, %29 : i64, !llvm.ptr
    %30 = llvm.intr.coro.suspend %13, %11 : i8
    %31 = llvm.icmp "eq" %30, %8 : i8
    llvm.cond_br %31, ^bb5, ^bb10(%30 : i8)
  ^bb5:  // pred: ^bb4
    %32 = llvm.getelementptr %arg1[56] : (!llvm.ptr) -> !llvm.ptr, i8
    %33 = llvm.load %32 : !llvm.ptr -> i64
    %34 = llvm.icmp "eq" %33, %5 : i64
    llvm.cond_br %34, ^bb6, ^bb14
  ^bb6:  // pred: ^bb5
    %35 = llvm.icmp "eq" %i_1, %3 : i32
    llvm.cond_br %35, ^bb7, ^bb8
  ^bb7:  // pred: ^bb6
    llvm.store %2, %42 : i32, !llvm.ptr<1>
    llvm.br ^bb9
  ^bb8:  // pred: ^bb6
    llvm.br ^bb9
  ^bb9:  // 2 preds: ^bb7, ^bb8
    llvm.br ^bb14
  ^bb10(%36: i8):  // 3 preds: ^bb0, ^bb4, ^bb14
    %37 = llvm.icmp "eq" %36, %1 : i8
    llvm.cond_br %37, ^bb11, ^bb12
  ^bb11:  // pred: ^bb10
    %38 = llvm.intr.coro.free %14, %17 : (!llvm.token, !llvm.ptr) -> !llvm.ptr
    llvm.call @free(%38) : (!llvm.ptr) -> ()
    llvm.br ^bb12
  ^bb12:  // 2 preds: ^bb10, ^bb11
    %39 = llvm.intr.coro.end %17, %11, %13 : (!llvm.ptr, i1, !llvm.token) -> i1
    llvm.return %17 : !llvm.ptr
  ^bb13:  // pred: ^bb0
    %40 = llvm.load %arg0 : !llvm.ptr -> !llvm.ptr<1>
    %41 = llvm.getelementptr %arg0[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %42 = llvm.load %41 : !llvm.ptr -> !llvm.ptr<1>
    %43 = llvm.getelementptr %arg0[16] : (!llvm.ptr) -> !llvm.ptr, i8
    %44 = llvm.load %43 : !llvm.ptr -> i32
    llvm.br ^bb1
  ^bb14:  // 2 preds: ^bb5, ^bb9
    %45 = llvm.getelementptr %arg1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %0, %45 : i64, !llvm.ptr
    %46 = llvm.intr.coro.suspend %13, %12 : i8
    llvm.br ^bb10(%46 : i8)
  }
}
