; ModuleID = 'LLVMDialectModule'
source_filename = "LLVMDialectModule"

@ep_shared = external addrspace(3) global [0 x i8], align 128

define ptx_kernel void @publish(ptr addrspace(1) %0, ptr addrspace(1) %1, i32 %2, ptr addrspace(1) %3) #0 !dbg !3 {
  %5 = call i32 @llvm.nvvm.read.ptx.sreg.tid.x(), !dbg !7
  %6 = icmp slt i32 %5, %2, !dbg !8
  br i1 %6, label %7, label %16, !dbg !8

7:                                                ; preds = %4
  %8 = sext i32 %5 to i64, !dbg !9
  %9 = mul i64 %8, 4, !dbg !9
  %10 = getelementptr i8, ptr addrspace(1) %0, i64 %9, !dbg !9
  %11 = load float, ptr addrspace(1) %10, align 4, !dbg !9
  %12 = fmul float %11, 2.000000e+00, !dbg !10
  %13 = sext i32 %5 to i64, !dbg !13
  %14 = mul i64 %13, 4, !dbg !13
  %15 = getelementptr i8, ptr addrspace(1) %0, i64 %14, !dbg !13
  store float %12, ptr addrspace(1) %15, align 4, !dbg !13
  br label %17, !dbg !14

16:                                               ; preds = %4
  br label %17, !dbg !14

17:                                               ; preds = %7, %16
  call void @llvm.nvvm.barrier.cta.sync.all(i32 0), !dbg !15
  %18 = icmp eq i32 %5, 0, !dbg !16
  br i1 %18, label %19, label %20, !dbg !16

19:                                               ; preds = %17
  call void asm sideeffect "st.release.sys.global.b32 [$0], $1;", "l,r,~{memory}"(ptr addrspace(1) %1, i32 1), !dbg !17
  br label %21, !dbg !18

20:                                               ; preds = %17
  br label %21, !dbg !18

21:                                               ; preds = %19, %20
  ret void, !dbg !19
}

; Function Attrs: nocallback nofree nosync nounwind speculatable willreturn memory(none)
declare noundef range(i32 0, 1024) i32 @llvm.nvvm.read.ptx.sreg.tid.x() #1

; Function Attrs: convergent nocallback nounwind
declare void @llvm.nvvm.barrier.cta.sync.all(i32) #2

attributes #0 = { "nvvm.maxntid"="128" "nvvm.minctasm"="1" }
attributes #1 = { nocallback nofree nosync nounwind speculatable willreturn memory(none) }
attributes #2 = { convergent nocallback nounwind }

!llvm.dbg.cu = !{!0}
!llvm.module.flags = !{!2}

!0 = distinct !DICompileUnit(language: DW_LANG_C, file: !1, producer: "MLIR", isOptimized: true, runtimeVersion: 0, emissionKind: DebugDirectivesOnly)
!1 = !DIFile(filename: "-", directory: "")
!2 = !{i32 2, !"Debug Info Version", i32 3}
!3 = distinct !DISubprogram(name: "publish", linkageName: "publish", scope: !4, file: !4, line: 13, type: !5, scopeLine: 13, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!4 = !DIFile(filename: "dump_kernel.py", directory: "tests/ir")
!5 = !DISubroutineType(cc: DW_CC_normal, types: !6)
!6 = !{}
!7 = !DILocation(line: 14, column: 9, scope: !3)
!8 = !DILocation(line: 15, column: 8, scope: !3)
!9 = !DILocation(line: 16, column: 26, scope: !3)
!10 = !DILocation(line: 8, column: 9, scope: !11, inlinedAt: !12)
!11 = distinct !DILexicalBlockFile(scope: !3, file: !4, discriminator: 0)
!12 = !DILocation(line: 16, column: 19, scope: !3)
!13 = !DILocation(line: 16, column: 9, scope: !3)
!14 = !DILocation(line: 15, column: 5, scope: !3)
!15 = !DILocation(line: 17, column: 5, scope: !3)
!16 = !DILocation(line: 18, column: 8, scope: !3)
!17 = !DILocation(line: 19, column: 9, scope: !3)
!18 = !DILocation(line: 18, column: 5, scope: !3)
!19 = !DILocation(line: 13, column: 1, scope: !3)
