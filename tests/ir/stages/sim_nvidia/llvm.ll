; ModuleID = 'LLVMDialectModule'
source_filename = "LLVMDialectModule"

declare !dbg !3 ptr @malloc(i64)

declare !dbg !6 void @free(ptr)

; Function Attrs: presplitcoroutine
define ptr @publish(ptr %0, ptr %1) #0 !dbg !7 {
  %3 = call token @llvm.coro.id(i32 0, ptr null, ptr null, ptr null), !dbg !9
  %4 = call i64 @llvm.coro.size.i64(), !dbg !9
  %5 = call ptr @malloc(i64 %4), !dbg !9
  %6 = call ptr @llvm.coro.begin(token %3, ptr %5), !dbg !9
  %7 = call i8 @llvm.coro.suspend(token none, i1 false), !dbg !9
  %8 = icmp eq i8 %7, 0, !dbg !9
  br i1 %8, label %44, label %38, !dbg !9

9:                                                ; preds = %44
  %10 = getelementptr i8, ptr %1, i32 72, !dbg !10
  %11 = load i64, ptr %10, align 4, !dbg !10
  %12 = trunc i64 %11 to i32, !dbg !10
  %13 = icmp slt i32 %12, %49, !dbg !11
  br i1 %13, label %14, label %23, !dbg !11

14:                                               ; preds = %9
  %15 = sext i32 %12 to i64, !dbg !12
  %16 = mul i64 %15, 4, !dbg !12
  %17 = getelementptr i8, ptr addrspace(1) %45, i64 %16, !dbg !12
  %18 = load float, ptr addrspace(1) %17, align 4, !dbg !12
  %19 = fmul float %18, 2.000000e+00, !dbg !13
  %20 = sext i32 %12 to i64, !dbg !16
  %21 = mul i64 %20, 4, !dbg !16
  %22 = getelementptr i8, ptr addrspace(1) %45, i64 %21, !dbg !16
  store float %19, ptr addrspace(1) %22, align 4, !dbg !16
  br label %24, !dbg !17

23:                                               ; preds = %9
  br label %24, !dbg !17

24:                                               ; preds = %14, %23
  %25 = getelementptr i8, ptr %1, i32 16, !dbg !18
  store i64 0, ptr %25, align 4, !dbg !18
  %26 = getelementptr i8, ptr %1, i32 8, !dbg !18
  store i64 4, ptr %26, align 4, !dbg !18
  %27 = call i8 @llvm.coro.suspend(token none, i1 false), !dbg !18
  %28 = icmp eq i8 %27, 0, !dbg !18
  br i1 %28, label %29, label %38, !dbg !18

29:                                               ; preds = %24
  %30 = getelementptr i8, ptr %1, i32 56, !dbg !18
  %31 = load i64, ptr %30, align 4, !dbg !18
  %32 = icmp eq i64 %31, 0, !dbg !18
  br i1 %32, label %33, label %50, !dbg !18

33:                                               ; preds = %29
  %34 = icmp eq i32 %12, 0, !dbg !19
  br i1 %34, label %35, label %36, !dbg !19

35:                                               ; preds = %33
  store i32 1, ptr addrspace(1) %47, align 4, !dbg !20
  br label %37, !dbg !21

36:                                               ; preds = %33
  br label %37, !dbg !21

37:                                               ; preds = %35, %36
  br label %50, !dbg !9

38:                                               ; preds = %50, %24, %2
  %39 = phi i8 [ %52, %50 ], [ %27, %24 ], [ %7, %2 ], !dbg !9
  %40 = icmp eq i8 %39, 1, !dbg !9
  br i1 %40, label %41, label %43, !dbg !9

41:                                               ; preds = %38
  %42 = call ptr @llvm.coro.free(token %3, ptr %6), !dbg !9
  call void @free(ptr %42), !dbg !9
  br label %43, !dbg !9

43:                                               ; preds = %41, %38
  call void @llvm.coro.end(ptr %6, i1 false, token none), !dbg !9
  ret ptr %6, !dbg !9

44:                                               ; preds = %2
  %45 = load ptr addrspace(1), ptr %0, align 8, !dbg !9
  %46 = getelementptr i8, ptr %0, i32 8, !dbg !9
  %47 = load ptr addrspace(1), ptr %46, align 8, !dbg !9
  %48 = getelementptr i8, ptr %0, i32 16, !dbg !9
  %49 = load i32, ptr %48, align 4, !dbg !9
  br label %9, !dbg !9

50:                                               ; preds = %37, %29
  %51 = getelementptr i8, ptr %1, i32 8, !dbg !9
  store i64 11, ptr %51, align 4, !dbg !9
  %52 = call i8 @llvm.coro.suspend(token none, i1 true), !dbg !9
  br label %38, !dbg !9
}

; Function Attrs: nocallback nofree nosync nounwind willreturn memory(argmem: read)
declare token @llvm.coro.id(i32, ptr readnone, ptr readonly captures(none), ptr) #1

; Function Attrs: nounwind memory(none)
declare i64 @llvm.coro.size.i64() #2

; Function Attrs: nounwind
declare ptr @llvm.coro.begin(token, ptr writeonly) #3

; Function Attrs: nounwind
declare i8 @llvm.coro.suspend(token, i1) #3

; Function Attrs: nounwind memory(argmem: read)
declare ptr @llvm.coro.free(token, ptr readonly captures(none)) #4

; Function Attrs: nounwind
declare void @llvm.coro.end(ptr, i1, token) #3

attributes #0 = { presplitcoroutine }
attributes #1 = { nocallback nofree nosync nounwind willreturn memory(argmem: read) }
attributes #2 = { nounwind memory(none) }
attributes #3 = { nounwind }
attributes #4 = { nounwind memory(argmem: read) }

!llvm.dbg.cu = !{!0}
!llvm.module.flags = !{!2}

!0 = distinct !DICompileUnit(language: DW_LANG_C, file: !1, producer: "MLIR", isOptimized: true, runtimeVersion: 0, emissionKind: LineTablesOnly)
!1 = !DIFile(filename: "-", directory: "")
!2 = !{i32 2, !"Debug Info Version", i32 3}
!3 = !DISubprogram(name: "malloc", linkageName: "malloc", scope: !1, file: !1, line: 1, type: !4, scopeLine: 1, spFlags: DISPFlagOptimized)
!4 = !DISubroutineType(cc: DW_CC_normal, types: !5)
!5 = !{}
!6 = !DISubprogram(name: "free", linkageName: "free", scope: !1, file: !1, line: 1, type: !4, scopeLine: 1, spFlags: DISPFlagOptimized)
!7 = distinct !DISubprogram(name: "publish", linkageName: "publish", scope: !8, file: !8, line: 13, type: !4, scopeLine: 13, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!8 = !DIFile(filename: "dump_kernel.py", directory: "tests/ir")
!9 = !DILocation(line: 13, column: 1, scope: !7)
!10 = !DILocation(line: 14, column: 9, scope: !7)
!11 = !DILocation(line: 15, column: 8, scope: !7)
!12 = !DILocation(line: 16, column: 26, scope: !7)
!13 = !DILocation(line: 8, column: 9, scope: !14, inlinedAt: !15)
!14 = distinct !DILexicalBlockFile(scope: !7, file: !8, discriminator: 0)
!15 = !DILocation(line: 16, column: 19, scope: !7)
!16 = !DILocation(line: 16, column: 9, scope: !7)
!17 = !DILocation(line: 15, column: 5, scope: !7)
!18 = !DILocation(line: 17, column: 5, scope: !7)
!19 = !DILocation(line: 18, column: 8, scope: !7)
!20 = !DILocation(line: 19, column: 9, scope: !7)
!21 = !DILocation(line: 18, column: 5, scope: !7)
