; ModuleID = 'LLVMDialectModule'
source_filename = "LLVMDialectModule"

@ep_shared = external addrspace(3) global [0 x i8], align 128
@ep_named_barriers = internal addrspace(3) global [16 x i32] poison, align 64

; Function Attrs: alwaysinline
define internal i32 @ep_lane_id() #0 !dbg !4 {
  %1 = call i32 @llvm.amdgcn.mbcnt.lo(i32 -1, i32 0), !dbg !7
  %2 = call i32 @llvm.amdgcn.mbcnt.hi(i32 -1, i32 %1), !dbg !8
  ret i32 %2, !dbg !9
}

; Function Attrs: alwaysinline
define internal void @ep_block_barrier() #0 !dbg !10 {
  call void @ep_release_block(), !dbg !11
  call void @llvm.amdgcn.s.barrier(), !dbg !12
  fence syncscope("workgroup") acquire, !dbg !13
  ret void, !dbg !14
}

; Function Attrs: alwaysinline
define internal void @ep_sleep(i32 %0) #0 !dbg !15 {
  %2 = udiv i32 %0, 10, !dbg !16
  %3 = zext i32 %2 to i64, !dbg !17
  %4 = call i64 @llvm.readsteadycounter(), !dbg !18
  br label %5, !dbg !19

5:                                                ; preds = %5, %1
  call void @llvm.amdgcn.s.sleep(i32 1), !dbg !20
  %6 = call i64 @llvm.readsteadycounter(), !dbg !21
  %7 = sub i64 %6, %4, !dbg !22
  %8 = icmp ult i64 %7, %3, !dbg !23
  br i1 %8, label %5, label %9, !dbg !24

9:                                                ; preds = %5
  ret void, !dbg !25
}

; Function Attrs: alwaysinline
define internal void @ep_named_barriers_clear() #0 !dbg !26 {
  %1 = call i32 @llvm.amdgcn.workitem.id.x(), !dbg !27
  %2 = call i32 @llvm.amdgcn.workitem.id.y(), !dbg !28
  %3 = call i32 @llvm.amdgcn.workitem.id.z(), !dbg !29
  %4 = or i32 %1, %2, !dbg !30
  %5 = or i32 %4, %3, !dbg !31
  %6 = icmp eq i32 %5, 0, !dbg !32
  br i1 %6, label %7, label %8, !dbg !33

7:                                                ; preds = %0
  store <16 x i32> zeroinitializer, ptr addrspace(3) @ep_named_barriers, align 64, !dbg !34
  br label %8, !dbg !35

8:                                                ; preds = %7, %0
  call void @ep_block_barrier(), !dbg !36
  ret void, !dbg !37
}

; Function Attrs: alwaysinline
define internal void @ep_named_barrier(i32 %0, i32 %1, i1 %2) #0 !dbg !38 {
  %4 = getelementptr i32, ptr addrspace(3) @ep_named_barriers, i32 %0, !dbg !39
  call void @ep_release_block(), !dbg !40
  %5 = call i64 @llvm.amdgcn.ballot.i64(i1 true), !dbg !41
  %6 = call i64 @llvm.cttz.i64(i64 %5, i1 false), !dbg !42
  %7 = trunc i64 %6 to i32, !dbg !43
  %8 = call i32 @ep_lane_id(), !dbg !44
  %9 = icmp eq i32 %8, %7, !dbg !45
  br i1 %9, label %10, label %23, !dbg !46

10:                                               ; preds = %3
  %11 = atomicrmw add ptr addrspace(3) %4, i32 1 syncscope("workgroup") monotonic, align 4, !dbg !47
  %12 = and i32 %11, 65535, !dbg !48
  %13 = lshr i32 %11, 16, !dbg !49
  %14 = icmp uge i32 %12, %1, !dbg !50
  %15 = zext i1 %14 to i32, !dbg !51
  %16 = add i32 %13, %15, !dbg !52
  %17 = add i32 %16, 1, !dbg !53
  %18 = add i32 %12, 1, !dbg !54
  %19 = icmp eq i32 %18, %1, !dbg !55
  br i1 %19, label %20, label %23, !dbg !56

20:                                               ; preds = %10
  %21 = sub i32 65536, %1, !dbg !57
  %22 = atomicrmw add ptr addrspace(3) %4, i32 %21 syncscope("workgroup") monotonic, align 4, !dbg !58
  br label %23, !dbg !59

23:                                               ; preds = %20, %10, %3
  %24 = phi i32 [ %17, %20 ], [ %17, %10 ], [ 0, %3 ], !dbg !60
  br i1 %2, label %25, label %35, !dbg !61

25:                                               ; preds = %23
  %26 = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %24), !dbg !62
  br label %27, !dbg !63

27:                                               ; preds = %33, %25
  %28 = load atomic i32, ptr addrspace(3) %4 syncscope("workgroup") monotonic, align 4, !dbg !64
  %29 = lshr i32 %28, 16, !dbg !65
  %30 = sub i32 %29, %26, !dbg !66
  %31 = trunc i32 %30 to i16, !dbg !67
  %32 = icmp sge i16 %31, 0, !dbg !68
  br i1 %32, label %34, label %33, !dbg !69

33:                                               ; preds = %27
  call void @llvm.amdgcn.s.sleep(i32 1), !dbg !70
  br label %27, !dbg !71

34:                                               ; preds = %27
  fence syncscope("workgroup") acquire, !dbg !72
  br label %35, !dbg !73

35:                                               ; preds = %34, %23
  ret void, !dbg !74
}

; Function Attrs: alwaysinline
define internal void @ep_mbarrier_init(ptr addrspace(3) %0, i32 %1) #0 !dbg !75 {
  %3 = shl i32 %1, 15, !dbg !76
  %4 = or i32 %3, %1, !dbg !77
  %5 = zext i32 %4 to i64, !dbg !78
  %6 = shl i64 %5, 32, !dbg !79
  call void @ep_release_block(), !dbg !80
  store atomic i64 %6, ptr addrspace(3) %0 syncscope("workgroup") monotonic, align 8, !dbg !81
  ret void, !dbg !82
}

; Function Attrs: alwaysinline
define internal void @ep_mbarrier_update(ptr addrspace(3) %0, i32 %1, i32 %2) #0 !dbg !83 {
  call void @ep_release_block(), !dbg !84
  %4 = load atomic i64, ptr addrspace(3) %0 syncscope("workgroup") monotonic, align 8, !dbg !85
  br label %5, !dbg !86

5:                                                ; preds = %5, %3
  %6 = phi i64 [ %25, %5 ], [ %4, %3 ], !dbg !87
  %7 = trunc i64 %6 to i32, !dbg !88
  %8 = lshr i64 %6, 32, !dbg !89
  %9 = trunc i64 %8 to i32, !dbg !90
  %10 = add i32 %7, %2, !dbg !91
  %11 = sub i32 %9, %1, !dbg !92
  %12 = and i32 %11, 32767, !dbg !93
  %13 = or i32 %10, %12, !dbg !94
  %14 = icmp eq i32 %13, 0, !dbg !95
  %15 = lshr i32 %11, 15, !dbg !96
  %16 = and i32 %15, 32767, !dbg !97
  %17 = or i32 %11, %16, !dbg !98
  %18 = xor i32 %17, -2147483648, !dbg !99
  %19 = select i1 %14, i32 %18, i32 %11, !dbg !100
  %20 = zext i32 %10 to i64, !dbg !101
  %21 = zext i32 %19 to i64, !dbg !102
  %22 = shl i64 %21, 32, !dbg !103
  %23 = or i64 %22, %20, !dbg !104
  %24 = cmpxchg ptr addrspace(3) %0, i64 %6, i64 %23 syncscope("workgroup") monotonic monotonic, align 8, !dbg !105
  %25 = extractvalue { i64, i1 } %24, 0, !dbg !106
  %26 = extractvalue { i64, i1 } %24, 1, !dbg !107
  br i1 %26, label %27, label %5, !dbg !108

27:                                               ; preds = %5
  ret void, !dbg !109
}

; Function Attrs: alwaysinline
define internal void @ep_mbarrier_arrive(ptr addrspace(3) %0) #0 !dbg !110 {
  call void @ep_mbarrier_update(ptr addrspace(3) %0, i32 1, i32 0), !dbg !111
  ret void, !dbg !112
}

; Function Attrs: alwaysinline
define internal void @ep_mbarrier_expect(ptr addrspace(3) %0, i32 %1) #0 !dbg !113 {
  call void @ep_mbarrier_update(ptr addrspace(3) %0, i32 1, i32 %1), !dbg !114
  ret void, !dbg !115
}

; Function Attrs: alwaysinline
define internal i1 @ep_mbarrier_test(ptr addrspace(3) %0, i32 %1) #0 !dbg !116 {
  %3 = load atomic i64, ptr addrspace(3) %0 syncscope("workgroup") acquire, align 8, !dbg !117
  %4 = lshr i64 %3, 63, !dbg !118
  %5 = trunc i64 %4 to i32, !dbg !119
  %6 = and i32 %1, 1, !dbg !120
  %7 = icmp ne i32 %5, %6, !dbg !121
  ret i1 %7, !dbg !122
}

; Function Attrs: alwaysinline
define internal void @ep_bulk_load(ptr addrspace(3) %0, ptr addrspace(1) %1, i32 %2, ptr addrspace(3) %3) #0 !dbg !123 {
  br label %5, !dbg !124

5:                                                ; preds = %8, %4
  %6 = phi i32 [ %12, %8 ], [ 0, %4 ], !dbg !125
  %7 = icmp ult i32 %6, %2, !dbg !126
  br i1 %7, label %8, label %13, !dbg !127

8:                                                ; preds = %5
  %9 = getelementptr i8, ptr addrspace(1) %1, i32 %6, !dbg !128
  %10 = getelementptr i8, ptr addrspace(3) %0, i32 %6, !dbg !129
  %11 = load <4 x i32>, ptr addrspace(1) %9, align 16, !dbg !130
  store <4 x i32> %11, ptr addrspace(3) %10, align 16, !dbg !131
  %12 = add i32 %6, 16, !dbg !132
  br label %5, !dbg !133

13:                                               ; preds = %5
  %14 = sub i32 0, %2, !dbg !134
  call void @ep_mbarrier_update(ptr addrspace(3) %3, i32 0, i32 %14), !dbg !135
  ret void, !dbg !136
}

; Function Attrs: alwaysinline
define internal void @ep_bulk_store(ptr addrspace(1) %0, ptr addrspace(3) %1, i32 %2) #0 !dbg !137 {
  br label %4, !dbg !138

4:                                                ; preds = %7, %3
  %5 = phi i32 [ %11, %7 ], [ 0, %3 ], !dbg !139
  %6 = icmp ult i32 %5, %2, !dbg !140
  br i1 %6, label %7, label %12, !dbg !141

7:                                                ; preds = %4
  %8 = getelementptr i8, ptr addrspace(3) %1, i32 %5, !dbg !142
  %9 = getelementptr i8, ptr addrspace(1) %0, i32 %5, !dbg !143
  %10 = load <4 x i32>, ptr addrspace(3) %8, align 16, !dbg !144
  store <4 x i32> %10, ptr addrspace(1) %9, align 16, !dbg !145
  %11 = add i32 %5, 16, !dbg !146
  br label %4, !dbg !147

12:                                               ; preds = %4
  ret void, !dbg !148
}

; Function Attrs: alwaysinline
define internal void @ep_release_block() #0 !dbg !149 {
  fence syncscope("workgroup") release, !dbg !150
  call void @llvm.amdgcn.s.waitcnt(i32 3952), !dbg !151
  ret void, !dbg !152
}

define amdgpu_kernel void @publish(ptr addrspace(1) %0, ptr addrspace(1) %1, i32 %2, ptr addrspace(1) %3) #1 !dbg !153 {
  %5 = call i32 @llvm.amdgcn.workitem.id.x(), !dbg !155
  %6 = icmp slt i32 %5, %2, !dbg !156
  br i1 %6, label %7, label %16, !dbg !156

7:                                                ; preds = %4
  %8 = sext i32 %5 to i64, !dbg !157
  %9 = mul i64 %8, 4, !dbg !157
  %10 = getelementptr i8, ptr addrspace(1) %0, i64 %9, !dbg !157
  %11 = load float, ptr addrspace(1) %10, align 4, !dbg !157
  %12 = fmul float %11, 2.000000e+00, !dbg !158
  %13 = sext i32 %5 to i64, !dbg !161
  %14 = mul i64 %13, 4, !dbg !161
  %15 = getelementptr i8, ptr addrspace(1) %0, i64 %14, !dbg !161
  store float %12, ptr addrspace(1) %15, align 4, !dbg !161
  br label %17, !dbg !162

16:                                               ; preds = %4
  br label %17, !dbg !162

17:                                               ; preds = %7, %16
  call void @ep_block_barrier(), !dbg !163
  %18 = icmp eq i32 %5, 0, !dbg !164
  br i1 %18, label %19, label %20, !dbg !164

19:                                               ; preds = %17
  fence release, !dbg !165
  call void @llvm.amdgcn.s.waitcnt(i32 3952), !dbg !165
  store atomic i32 1, ptr addrspace(1) %1 monotonic, align 4, !dbg !165
  br label %21, !dbg !166

20:                                               ; preds = %17
  br label %21, !dbg !166

21:                                               ; preds = %19, %20
  ret void, !dbg !167
}

; Function Attrs: nocallback nocreateundeforpoison nofree nosync nounwind willreturn memory(none)
declare i32 @llvm.amdgcn.mbcnt.lo(i32, i32) #2

; Function Attrs: nocallback nocreateundeforpoison nofree nosync nounwind willreturn memory(none)
declare i32 @llvm.amdgcn.mbcnt.hi(i32, i32) #2

; Function Attrs: convergent nocallback nofree nounwind willreturn
declare void @llvm.amdgcn.s.barrier() #3

; Function Attrs: nocallback nofree nosync nounwind willreturn
declare i64 @llvm.readsteadycounter() #4

; Function Attrs: nocallback nofree nosync nounwind willreturn
declare void @llvm.amdgcn.s.sleep(i32 immarg) #4

; Function Attrs: nocallback nofree nosync nounwind speculatable willreturn memory(none)
declare noundef range(i32 0, 1024) i32 @llvm.amdgcn.workitem.id.x() #5

; Function Attrs: nocallback nofree nosync nounwind speculatable willreturn memory(none)
declare noundef range(i32 0, 1024) i32 @llvm.amdgcn.workitem.id.y() #5

; Function Attrs: nocallback nofree nosync nounwind speculatable willreturn memory(none)
declare noundef range(i32 0, 1024) i32 @llvm.amdgcn.workitem.id.z() #5

; Function Attrs: convergent nocallback nocreateundeforpoison nofree nounwind willreturn memory(none)
declare i64 @llvm.amdgcn.ballot.i64(i1) #6

; Function Attrs: nocallback nofree nosync nounwind speculatable willreturn memory(none)
declare i64 @llvm.cttz.i64(i64, i1 immarg) #5

; Function Attrs: convergent nocallback nocreateundeforpoison nofree nounwind willreturn memory(none)
declare i32 @llvm.amdgcn.readfirstlane.i32(i32) #6

; Function Attrs: nocallback nofree nounwind willreturn
declare void @llvm.amdgcn.s.waitcnt(i32 immarg) #7

attributes #0 = { alwaysinline }
attributes #1 = { "amdgpu-flat-work-group-size"="1,128" "uniform-work-group-size"="true" }
attributes #2 = { nocallback nocreateundeforpoison nofree nosync nounwind willreturn memory(none) }
attributes #3 = { convergent nocallback nofree nounwind willreturn }
attributes #4 = { nocallback nofree nosync nounwind willreturn }
attributes #5 = { nocallback nofree nosync nounwind speculatable willreturn memory(none) }
attributes #6 = { convergent nocallback nocreateundeforpoison nofree nounwind willreturn memory(none) }
attributes #7 = { nocallback nofree nounwind willreturn }

!llvm.dbg.cu = !{!0}
!llvm.module.flags = !{!2, !3}

!0 = distinct !DICompileUnit(language: DW_LANG_C, file: !1, producer: "MLIR", isOptimized: true, runtimeVersion: 0, emissionKind: LineTablesOnly)
!1 = !DIFile(filename: "-", directory: "")
!2 = !{i32 1, !"amdhsa_code_object_version", i32 500}
!3 = !{i32 2, !"Debug Info Version", i32 3}
!4 = distinct !DISubprogram(name: "ep_lane_id", linkageName: "ep_lane_id", scope: !1, file: !1, line: 4, type: !5, scopeLine: 4, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!5 = !DISubroutineType(cc: DW_CC_normal, types: !6)
!6 = !{}
!7 = !DILocation(line: 7, column: 10, scope: !4)
!8 = !DILocation(line: 8, column: 11, scope: !4)
!9 = !DILocation(line: 9, column: 3, scope: !4)
!10 = distinct !DISubprogram(name: "ep_block_barrier", linkageName: "ep_block_barrier", scope: !1, file: !1, line: 12, type: !5, scopeLine: 12, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!11 = !DILocation(line: 13, column: 3, scope: !10)
!12 = !DILocation(line: 14, column: 3, scope: !10)
!13 = !DILocation(line: 15, column: 3, scope: !10)
!14 = !DILocation(line: 16, column: 3, scope: !10)
!15 = distinct !DISubprogram(name: "ep_sleep", linkageName: "ep_sleep", scope: !1, file: !1, line: 20, type: !5, scopeLine: 20, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!16 = !DILocation(line: 23, column: 14, scope: !15)
!17 = !DILocation(line: 24, column: 12, scope: !15)
!18 = !DILocation(line: 25, column: 14, scope: !15)
!19 = !DILocation(line: 26, column: 3, scope: !15)
!20 = !DILocation(line: 28, column: 3, scope: !15)
!21 = !DILocation(line: 29, column: 10, scope: !15)
!22 = !DILocation(line: 30, column: 13, scope: !15)
!23 = !DILocation(line: 31, column: 12, scope: !15)
!24 = !DILocation(line: 32, column: 3, scope: !15)
!25 = !DILocation(line: 34, column: 3, scope: !15)
!26 = distinct !DISubprogram(name: "ep_named_barriers_clear", linkageName: "ep_named_barriers_clear", scope: !1, file: !1, line: 43, type: !5, scopeLine: 43, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!27 = !DILocation(line: 47, column: 8, scope: !26)
!28 = !DILocation(line: 48, column: 8, scope: !26)
!29 = !DILocation(line: 49, column: 8, scope: !26)
!30 = !DILocation(line: 50, column: 9, scope: !26)
!31 = !DILocation(line: 51, column: 10, scope: !26)
!32 = !DILocation(line: 52, column: 12, scope: !26)
!33 = !DILocation(line: 53, column: 3, scope: !26)
!34 = !DILocation(line: 55, column: 3, scope: !26)
!35 = !DILocation(line: 56, column: 3, scope: !26)
!36 = !DILocation(line: 58, column: 3, scope: !26)
!37 = !DILocation(line: 59, column: 3, scope: !26)
!38 = distinct !DISubprogram(name: "ep_named_barrier", linkageName: "ep_named_barrier", scope: !1, file: !1, line: 64, type: !5, scopeLine: 64, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!39 = !DILocation(line: 73, column: 11, scope: !38)
!40 = !DILocation(line: 74, column: 3, scope: !38)
!41 = !DILocation(line: 75, column: 14, scope: !38)
!42 = !DILocation(line: 76, column: 15, scope: !38)
!43 = !DILocation(line: 77, column: 13, scope: !38)
!44 = !DILocation(line: 78, column: 11, scope: !38)
!45 = !DILocation(line: 79, column: 12, scope: !38)
!46 = !DILocation(line: 80, column: 3, scope: !38)
!47 = !DILocation(line: 82, column: 10, scope: !38)
!48 = !DILocation(line: 83, column: 12, scope: !38)
!49 = !DILocation(line: 84, column: 12, scope: !38)
!50 = !DILocation(line: 85, column: 12, scope: !38)
!51 = !DILocation(line: 86, column: 14, scope: !38)
!52 = !DILocation(line: 87, column: 11, scope: !38)
!53 = !DILocation(line: 88, column: 11, scope: !38)
!54 = !DILocation(line: 89, column: 13, scope: !38)
!55 = !DILocation(line: 90, column: 11, scope: !38)
!56 = !DILocation(line: 91, column: 3, scope: !38)
!57 = !DILocation(line: 93, column: 17, scope: !38)
!58 = !DILocation(line: 94, column: 13, scope: !38)
!59 = !DILocation(line: 95, column: 3, scope: !38)
!60 = !DILocation(line: 96, column: 10, scope: !38)
!61 = !DILocation(line: 97, column: 3, scope: !38)
!62 = !DILocation(line: 99, column: 13, scope: !38)
!63 = !DILocation(line: 100, column: 3, scope: !38)
!64 = !DILocation(line: 102, column: 11, scope: !38)
!65 = !DILocation(line: 103, column: 17, scope: !38)
!66 = !DILocation(line: 104, column: 14, scope: !38)
!67 = !DILocation(line: 105, column: 12, scope: !38)
!68 = !DILocation(line: 106, column: 15, scope: !38)
!69 = !DILocation(line: 107, column: 3, scope: !38)
!70 = !DILocation(line: 109, column: 3, scope: !38)
!71 = !DILocation(line: 110, column: 3, scope: !38)
!72 = !DILocation(line: 112, column: 3, scope: !38)
!73 = !DILocation(line: 113, column: 3, scope: !38)
!74 = !DILocation(line: 115, column: 3, scope: !38)
!75 = distinct !DISubprogram(name: "ep_mbarrier_init", linkageName: "ep_mbarrier_init", scope: !1, file: !1, line: 119, type: !5, scopeLine: 119, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!76 = !DILocation(line: 122, column: 14, scope: !75)
!77 = !DILocation(line: 123, column: 13, scope: !75)
!78 = !DILocation(line: 124, column: 11, scope: !75)
!79 = !DILocation(line: 125, column: 12, scope: !75)
!80 = !DILocation(line: 126, column: 3, scope: !75)
!81 = !DILocation(line: 127, column: 3, scope: !75)
!82 = !DILocation(line: 128, column: 3, scope: !75)
!83 = distinct !DISubprogram(name: "ep_mbarrier_update", linkageName: "ep_mbarrier_update", scope: !1, file: !1, line: 131, type: !5, scopeLine: 131, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!84 = !DILocation(line: 137, column: 3, scope: !83)
!85 = !DILocation(line: 138, column: 11, scope: !83)
!86 = !DILocation(line: 139, column: 3, scope: !83)
!87 = !DILocation(line: 140, column: 6, scope: !83)
!88 = !DILocation(line: 141, column: 16, scope: !83)
!89 = !DILocation(line: 142, column: 17, scope: !83)
!90 = !DILocation(line: 143, column: 15, scope: !83)
!91 = !DILocation(line: 144, column: 16, scope: !83)
!92 = !DILocation(line: 145, column: 11, scope: !83)
!93 = !DILocation(line: 146, column: 14, scope: !83)
!94 = !DILocation(line: 147, column: 11, scope: !83)
!95 = !DILocation(line: 148, column: 15, scope: !83)
!96 = !DILocation(line: 149, column: 22, scope: !83)
!97 = !DILocation(line: 150, column: 14, scope: !83)
!98 = !DILocation(line: 151, column: 15, scope: !83)
!99 = !DILocation(line: 152, column: 14, scope: !83)
!100 = !DILocation(line: 153, column: 15, scope: !83)
!101 = !DILocation(line: 154, column: 18, scope: !83)
!102 = !DILocation(line: 155, column: 17, scope: !83)
!103 = !DILocation(line: 156, column: 14, scope: !83)
!104 = !DILocation(line: 157, column: 10, scope: !83)
!105 = !DILocation(line: 158, column: 14, scope: !83)
!106 = !DILocation(line: 159, column: 10, scope: !83)
!107 = !DILocation(line: 160, column: 11, scope: !83)
!108 = !DILocation(line: 161, column: 3, scope: !83)
!109 = !DILocation(line: 163, column: 3, scope: !83)
!110 = distinct !DISubprogram(name: "ep_mbarrier_arrive", linkageName: "ep_mbarrier_arrive", scope: !1, file: !1, line: 166, type: !5, scopeLine: 166, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!111 = !DILocation(line: 169, column: 3, scope: !110)
!112 = !DILocation(line: 170, column: 3, scope: !110)
!113 = distinct !DISubprogram(name: "ep_mbarrier_expect", linkageName: "ep_mbarrier_expect", scope: !1, file: !1, line: 173, type: !5, scopeLine: 173, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!114 = !DILocation(line: 175, column: 3, scope: !113)
!115 = !DILocation(line: 176, column: 3, scope: !113)
!116 = distinct !DISubprogram(name: "ep_mbarrier_test", linkageName: "ep_mbarrier_test", scope: !1, file: !1, line: 179, type: !5, scopeLine: 179, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!117 = !DILocation(line: 182, column: 12, scope: !116)
!118 = !DILocation(line: 183, column: 14, scope: !116)
!119 = !DILocation(line: 184, column: 12, scope: !116)
!120 = !DILocation(line: 185, column: 12, scope: !116)
!121 = !DILocation(line: 186, column: 11, scope: !116)
!122 = !DILocation(line: 187, column: 3, scope: !116)
!123 = distinct !DISubprogram(name: "ep_bulk_load", linkageName: "ep_bulk_load", scope: !1, file: !1, line: 190, type: !5, scopeLine: 190, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!124 = !DILocation(line: 193, column: 3, scope: !123)
!125 = !DILocation(line: 194, column: 7, scope: !123)
!126 = !DILocation(line: 195, column: 11, scope: !123)
!127 = !DILocation(line: 196, column: 3, scope: !123)
!128 = !DILocation(line: 198, column: 11, scope: !123)
!129 = !DILocation(line: 199, column: 9, scope: !123)
!130 = !DILocation(line: 200, column: 12, scope: !123)
!131 = !DILocation(line: 201, column: 3, scope: !123)
!132 = !DILocation(line: 202, column: 11, scope: !123)
!133 = !DILocation(line: 203, column: 3, scope: !123)
!134 = !DILocation(line: 205, column: 13, scope: !123)
!135 = !DILocation(line: 206, column: 3, scope: !123)
!136 = !DILocation(line: 207, column: 3, scope: !123)
!137 = distinct !DISubprogram(name: "ep_bulk_store", linkageName: "ep_bulk_store", scope: !1, file: !1, line: 210, type: !5, scopeLine: 210, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!138 = !DILocation(line: 213, column: 3, scope: !137)
!139 = !DILocation(line: 214, column: 7, scope: !137)
!140 = !DILocation(line: 215, column: 11, scope: !137)
!141 = !DILocation(line: 216, column: 3, scope: !137)
!142 = !DILocation(line: 218, column: 11, scope: !137)
!143 = !DILocation(line: 219, column: 9, scope: !137)
!144 = !DILocation(line: 220, column: 12, scope: !137)
!145 = !DILocation(line: 221, column: 3, scope: !137)
!146 = !DILocation(line: 222, column: 11, scope: !137)
!147 = !DILocation(line: 223, column: 3, scope: !137)
!148 = !DILocation(line: 225, column: 3, scope: !137)
!149 = distinct !DISubprogram(name: "ep_release_block", linkageName: "ep_release_block", scope: !1, file: !1, line: 228, type: !5, scopeLine: 228, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!150 = !DILocation(line: 230, column: 3, scope: !149)
!151 = !DILocation(line: 231, column: 3, scope: !149)
!152 = !DILocation(line: 232, column: 3, scope: !149)
!153 = distinct !DISubprogram(name: "publish", linkageName: "publish", scope: !154, file: !154, line: 13, type: !5, scopeLine: 13, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !0)
!154 = !DIFile(filename: "dump_kernel.py", directory: "tests/ir")
!155 = !DILocation(line: 14, column: 9, scope: !153)
!156 = !DILocation(line: 15, column: 8, scope: !153)
!157 = !DILocation(line: 16, column: 26, scope: !153)
!158 = !DILocation(line: 8, column: 9, scope: !159, inlinedAt: !160)
!159 = distinct !DILexicalBlockFile(scope: !153, file: !154, discriminator: 0)
!160 = !DILocation(line: 16, column: 19, scope: !153)
!161 = !DILocation(line: 16, column: 9, scope: !153)
!162 = !DILocation(line: 15, column: 5, scope: !153)
!163 = !DILocation(line: 17, column: 5, scope: !153)
!164 = !DILocation(line: 18, column: 8, scope: !153)
!165 = !DILocation(line: 19, column: 9, scope: !153)
!166 = !DILocation(line: 18, column: 5, scope: !153)
!167 = !DILocation(line: 13, column: 1, scope: !153)
