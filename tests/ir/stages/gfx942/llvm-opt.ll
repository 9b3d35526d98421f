; ModuleID = '<string>'
source_filename = "LLVMDialectModule"
target datalayout = "e-m:e-p:64:64-p1:64:64-p2:32:32-p3:32:32-p4:64:64-p5:32:32-p6:32:32-p7:160:256:256:32-p8:128:128:128:48-p9:192:256:256:32-i64:64-v16:16-v24:32-v32:32-v48:64-v96:128-v192:256-v256:256-v512:512-v1024:1024-v2048:2048-n32:64-S32-A5-G1-ni:7:8:9"
target triple = "amdgcn-amd-amdhsa"

; Function Attrs: mustprogress nofree norecurse nounwind willreturn
define amdgpu_kernel void @publish(ptr addrspace(1) captures(none) %0, ptr addrspace(1) writeonly captures(none) %1, i32 %2, ptr addrspace(1) readnone captures(none) %3) local_unnamed_addr #0 !dbg !4 {
  %5 = tail call i32 @llvm.amdgcn.workitem.id.x(), !dbg !8
  %6 = icmp slt i32 %5, %2, !dbg !9
  br i1 %6, label %7, label %13, !dbg !9

7:                                                ; preds = %4
  %8 = shl nuw nsw i32 %5, 2
  %9 = zext nneg i32 %8 to i64
  %10 = getelementptr i8, ptr addrspace(1) %0, i64 %9
  %11 = load float, ptr addrspace(1) %10, align 4, !dbg !10
  %12 = fmul float %11, 2.000000e+00, !dbg !11
  store float %12, ptr addrspace(1) %10, align 4, !dbg !14
  br label %13, !dbg !15

13:                                               ; preds = %4, %7
  fence syncscope("workgroup") release, !dbg !16
  tail call void @llvm.amdgcn.s.waitcnt(i32 3952), !dbg !21
  tail call void @llvm.amdgcn.s.barrier(), !dbg !22
  fence syncscope("workgroup") acquire, !dbg !23
  %14 = icmp eq i32 %5, 0, !dbg !24
  br i1 %14, label %15, label %16, !dbg !24

15:                                               ; preds = %13
  fence release, !dbg !25
  tail call void @llvm.amdgcn.s.waitcnt(i32 3952), !dbg !25
  store atomic i32 1, ptr addrspace(1) %1 monotonic, align 4, !dbg !25
  br label %16, !dbg !26

16:                                               ; preds = %13, %15
  ret void, !dbg !27
}

; Function Attrs: convergent mustprogress nocallback nofree nounwind willreturn
declare void @llvm.amdgcn.s.barrier() #1

; Function Attrs: mustprogress nocallback nofree nosync nounwind speculatable willreturn memory(none)
declare noundef range(i32 0, 1024) i32 @llvm.amdgcn.workitem.id.x() #2

; Function Attrs: mustprogress nocallback nofree nounwind willreturn
declare void @llvm.amdgcn.s.waitcnt(i32 immarg) #3

attributes #0 = { mustprogress nofree norecurse nounwind willreturn "amdgpu-agpr-alloc"="0" "amdgpu-flat-work-group-size"="1,128" "amdgpu-no-cluster-id-x" "amdgpu-no-cluster-id-y" "amdgpu-no-cluster-id-z" "amdgpu-no-completion-action" "amdgpu-no-default-queue" "amdgpu-no-dispatch-id" "amdgpu-no-dispatch-ptr" "amdgpu-no-flat-scratch-init" "amdgpu-no-heap-ptr" "amdgpu-no-hostcall-ptr" "amdgpu-no-implicitarg-ptr" "amdgpu-no-lds-kernel-id" "amdgpu-no-multigrid-sync-arg" "amdgpu-no-queue-ptr" "amdgpu-no-workgroup-id-x" "amdgpu-no-workgroup-id-y" "amdgpu-no-workgroup-id-z" "amdgpu-no-workitem-id-x" "amdgpu-no-workitem-id-y" "amdgpu-no-workitem-id-z" "uniform-work-group-size"="true" }
attributes #1 = { convergent mustprogress nocallback nofree nounwind willreturn }
attributes #2 = { mustprogress nocallback nofree nosync nounwind speculatable willreturn memory(none) }
attributes #3 = { mustprogress nocallback nofree nounwind willreturn }

!llvm.dbg.cu = !{!0}
!llvm.module.flags = !{!2, !3}

!0 = distinct !DICompileUnit(language: DW_LANG_C, file: !1, producer: "MLIR", isOptimized: true, runtimeVersion: 0, emissionKind: LineTablesOnly)
!1 = !DIFile(filename: "-", directory: "")
!2 = !{i32 1, !"amdhsa_code_object_version", i32 500}
!3 = !{i32 2, !"Debug Info Version", i32 3}
!4 = distinct !DISubprogram(name: "publish", linkageName: "publish", scope: !5, file: !5, line: 13, type: !6, scopeLine: 13, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!5 = !DIFile(filename: "dump_kernel.py", directory: "tests/ir")
!6 = !DISubroutineType(cc: DW_CC_normal, types: !7)
!7 = !{}
!8 = !DILocation(line: 14, column: 9, scope: !4)
!9 = !DILocation(line: 15, column: 8, scope: !4)
!10 = !DILocation(line: 16, column: 26, scope: !4)
!11 = !DILocation(line: 8, column: 9, scope: !12, inlinedAt: !13)
!12 = distinct !DILexicalBlockFile(scope: !4, file: !5, discriminator: 0)
!13 = !DILocation(line: 16, column: 19, scope: !4)
!14 = !DILocation(line: 16, column: 9, scope: !4)
!15 = !DILocation(line: 15, column: 5, scope: !4)
!16 = !DILocation(line: 230, column: 3, scope: !17, inlinedAt: !18)
!17 = distinct !DISubprogram(name: "ep_release_block", linkageName: "ep_release_block", scope: !1, file: !1, line: 228, type: !6, scopeLine: 228, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!18 = distinct !DILocation(line: 13, column: 3, scope: !19, inlinedAt: !20)
!19 = distinct !DISubprogram(name: "ep_block_barrier", linkageName: "ep_block_barrier", scope: !1, file: !1, line: 12, type: !6, scopeLine: 12, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!20 = distinct !DILocation(line: 17, column: 5, scope: !4)
!21 = !DILocation(line: 231, column: 3, scope: !17, inlinedAt: !18)
!22 = !DILocation(line: 14, column: 3, scope: !19, inlinedAt: !20)
!23 = !DILocation(line: 15, column: 3, scope: !19, inlinedAt: !20)
!24 = !DILocation(line: 18, column: 8, scope: !4)
!25 = !DILocation(line: 19, column: 9, scope: !4)
!26 = !DILocation(line: 18, column: 5, scope: !4)
!27 = !DILocation(line: 13, column: 1, scope: !4)
