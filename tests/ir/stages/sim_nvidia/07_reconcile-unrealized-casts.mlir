// unchanged: as after 06_convert-cf-to-llvm
