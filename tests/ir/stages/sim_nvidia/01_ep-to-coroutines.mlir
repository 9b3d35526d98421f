module {
  llvm.func @malloc(i64) -> !llvm.ptr
  llvm.func @free(!llvm.ptr)
  llvm.func @publish(%arg0: !llvm.ptr, %arg1: !llvm.ptr) -> !llvm.ptr attributes {passthrough = ["presplitcoroutine"]} {
    %0 = llvm.mlir.zero : !llvm.ptr
    %1 = llvm.mlir.constant(false) : i1
    %2 = llvm.mlir.constant(true) : i1
    %3 = llvm.mlir.none : !llvm.token
    %4 = llvm.mlir.constant(0 : i32) : i32
    %5 = llvm.intr.coro.id %4, %0, %0, %0 : (i32, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> !llvm.token
    %6 = llvm.intr.coro.size : i64
    %7 = llvm.call @malloc(%6) : (i64) -> !llvm.ptr
    %8 = llvm.intr.coro.begin %5, %7 : (!llvm.token, !llvm.ptr) -> !llvm.ptr
    %9 = llvm.intr.coro.suspend %3, %1 : i8
    %10 = llvm.mlir.constant(0 : i8) : i8
    %11 = llvm.icmp "eq" %9, %10 : i8
    llvm.cond_br %11, ^bb13, ^bb10(%9 : i8)
  ^bb1(%data: !llvm.ptr<1>, %flag: !llvm.ptr<1>, %n: i32, %context: !llvm.ptr<1>):  // pred: ^bb13
    %i = llvm.getelementptr %arg1[72] : (!llvm.ptr) -> !llvm.ptr, i8
    %i_0 = llvm.load %i : !llvm.ptr -> i64
    %i_1 = llvm.trunc %i_0 : i64 to i32
    %12 = arith.cmpi slt, %i_1, %n : i32
    cf.cond_br %12, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %13 = arith.extsi %i_1 : i32 to i64
    %c4_i64 = arith.constant 4 : i64
    %14 = arith.muli %13, %c4_i64 : i64
    %15 = llvm.getelementptr %data[%14] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
    %16 = llvm.load %15 : !llvm.ptr<1> -> f32
    %cst = arith.constant 2.000000e+00 : f32
    %y = arith.mulf %16, %cst : f32
    %17 = arith.extsi %i_1 : i32 to i64
    %c4_i64_2 = arith.constant 4 : i64
    %18 = arith.muli %17, %c4_i64_2 : i64
    %19 = llvm.getelementptr %data[%18] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i8
    llvm.store %y, %19 : f32, !llvm.ptr<1>
    cf.br ^bb4
  ^bb3:  // pred: ^bb1
    cf.br ^bb4
  ^bb4:  // 2 preds: ^bb2, ^bb3
    %20 = llvm.mlir.constant(0 : i64) : i64
    %21 = llvm.getelementptr %arg1[16] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %20, %21 : i64, !llvm.ptr
    %22 = llvm.mlir.constant(4 : i64) : i64
    %23 = llvm.getelementptr %arg1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %22, %23 : i64, !llvm.ptr
    %24 = llvm.intr.coro.suspend %3, %1 : i8
    %25 = llvm.mlir.constant(0 : i8) : i8
    %26 = llvm.icmp "eq" %24, %25 : i8
    llvm.cond_br %26, ^bb5, ^bb10(%24 : i8)
  ^bb5:  // pred: ^bb4
    %27 = llvm.getelementptr %arg1[56] : (!llvm.ptr) -> !llvm.ptr, i8
    %28 = llvm.load %27 : !llvm.ptr -> i64
    %29 = llvm.mlir.constant(0 : i64) : i64
    %30 = llvm.icmp "eq" %28, %29 : i64
    llvm.cond_br %30, ^bb6, ^bb14
  ^bb6:  // pred: ^bb5
    %c0_i32 = arith.constant 0 : i32
    %31 = arith.cmpi eq, %i_1, %c0_i32 : i32
    cf.cond_br %31, ^bb7, ^bb8
  ^bb7:  // pred: ^bb6
    %c1_i32 = arith.constant 1 : i32
    llvm.store %c1_i32, %flag : i32, !llvm.ptr<1>
    cf.br ^bb9
  ^bb8:  // pred: ^bb6
    cf.br ^bb9
  ^bb9:  // 2 preds: ^bb7, ^bb8
    llvm.br ^bb14
  ^bb10(%32: i8):  // 3 preds: ^bb0, ^bb4, ^bb14
    %33 = llvm.mlir.constant(1 : i8) : i8
    %34 = llvm.icmp "eq" %32, %33 : i8
    llvm.cond_br %34, ^bb11, ^bb12
  ^bb11:  // pred: ^bb10
    %35 = llvm.intr.coro.free %5, %8 : (!llvm.token, !llvm.ptr) -> !llvm.ptr
    llvm.call @free(%35) : (!llvm.ptr) -> ()
    llvm.br ^bb12
  ^bb12:  // 2 preds: ^bb10, ^bb11
    %36 = llvm.intr.coro.end %8, %1, %3 : (!llvm.ptr, i1, !llvm.token) -> i1
    llvm.return %8 : !llvm.ptr
  ^bb13:  // pred: ^bb0
    %37 = llvm.getelementptr %arg0[0] : (!llvm.ptr) -> !llvm.ptr, i8
    %38 = llvm.load %37 : !llvm.ptr -> !llvm.ptr<1>
    %39 = llvm.getelementptr %arg0[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %40 = llvm.load %39 : !llvm.ptr -> !llvm.ptr<1>
    %41 = llvm.getelementptr %arg0[16] : (!llvm.ptr) -> !llvm.ptr, i8
    %42 = llvm.load %41 : !llvm.ptr -> i32
    %43 = llvm.getelementptr %arg0[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %44 = llvm.load %43 : !llvm.ptr -> !llvm.ptr<1>
    llvm.br ^bb1(%38, %40, %42, %44 : !llvm.ptr<1>, !llvm.ptr<1>, i32, !llvm.ptr<1>)
  ^bb14:  // 2 preds: ^bb5, ^bb9
    %45 = llvm.mlir.constant(11 : i64) : i64
    %46 = llvm.getelementptr %arg1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %45, %46 : i64, !llvm.ptr
    %47 = llvm.intr.coro.suspend %3, %2 : i8
    llvm.br ^bb10(%47 : i8)
  }
}
