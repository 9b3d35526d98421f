// unchanged: as after 10_convert-cf-to-llvm
