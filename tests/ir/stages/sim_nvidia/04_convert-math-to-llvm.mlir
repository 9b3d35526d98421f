// unchanged: as after 03_convert-vector-to-llvm
