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
    %20 = llvm.getelementptr %arg1[72] : (!llvm.ptr) -> !llvm.ptr, i8
    %21 = llvm.load %20 : !llvm.ptr -> i64
    %22 = llvm.trunc %21 : i64 to i32
    %23 = llvm.icmp "slt" %22, %48 : i32
    llvm.cond_br %23, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %24 = llvm.sext %22 : i32 to i64
    %25 = llvm.mul %24, %7 : i64
    %26 = llvm.getelementptr %44[%25] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
    %27 = llvm.load %26 : !llvm.ptr<1> -> f32
    %28 = llvm.fmul %27, %6 : f32
    %29 = llvm.sext %22 : i32 to i64
    %30 = llvm.mul %29, %7 : i64
    %31 = llvm.getelementptr %44[%30] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
    llvm.store %28, %31 : f32, !llvm.ptr<1>
    llvm.br ^bb4
  ^bb3:  // pred: ^bb1
    llvm.br ^bb4
  ^bb4:  // 2 preds: ^bb2, ^bb3
    %32 = llvm.getelementptr %arg1[16] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %5, %32 : i64, !llvm.ptr
    %33 = llvm.getelementptr %arg1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %4, %33 : i64, !llvm.ptr
    %34 = llvm.intr.coro.suspend %13, %11 : i8
    %35 = llvm.icmp "eq" %34, %8 : i8
    llvm.cond_br %35, ^bb5, ^bb10(%34 : i8)
  ^bb5:  // pred: ^bb4
    %36 = llvm.getelementptr %arg1[56] : (!llvm.ptr) -> !llvm.ptr, i8
    %37 = llvm.load %36 : !llvm.ptr -> i64
    %38 = llvm.icmp "eq" %37, %5 : i64
    llvm.cond_br %38, ^bb6, ^bb14
  ^bb6:  // pred: ^bb5
    %39 = llvm.icmp "eq" %22, %3 : i32
    llvm.cond_br %39, ^bb7, ^bb8
  ^bb7:  // pred: ^bb6
    llvm.store %2, %46 : i32, !llvm.ptr<1>
    llvm.br ^bb9
  ^bb8:  // pred: ^bb6
    llvm.br ^bb9
  ^bb9:  // 2 preds: ^bb7, ^bb8
    llvm.br ^bb14
  ^bb10(%40: i8):  // 3 preds: ^bb0, ^bb4, ^bb14
    %41 = llvm.icmp "eq" %40, %1 : i8
    llvm.cond_br %41, ^bb11, ^bb12
  ^bb11:  // pred: ^bb10
    %42 = llvm.intr.coro.free %14, %17 : (!llvm.token, !llvm.ptr) -> !llvm.ptr
    llvm.call @free(%42) : (!llvm.ptr) -> ()
    llvm.br ^bb12
  ^bb12:  // 2 preds: ^bb10, ^bb11
    %43 = llvm.intr.coro.end %17, %11, %13 : (!llvm.ptr, i1, !llvm.token) -> i1
    llvm.return %17 : !llvm.ptr
  ^bb13:  // pred: ^bb0
    %44 = llvm.load %arg0 : !llvm.ptr -> !llvm.ptr<1>
    %45 = llvm.getelementptr %arg0[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %46 = llvm.load %45 : !llvm.ptr -> !llvm.ptr<1>
    %47 = llvm.getelementptr %arg0[16] : (!llvm.ptr) -> !llvm.ptr, i8
    %48 = llvm.load %47 : !llvm.ptr -> i32
    llvm.br ^bb1
  ^bb14:  // 2 preds: ^bb5, ^bb9
    %49 = llvm.getelementptr %arg1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %0, %49 : i64, !llvm.ptr
    %50 = llvm.intr.coro.suspend %13, %12 : i8
    llvm.br ^bb10(%50 : i8)
  }
}
