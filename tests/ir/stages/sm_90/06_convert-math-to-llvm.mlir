// unchanged: as after 05_convert-vector-to-llvm
