// unchanged: as after 07_convert-vector-to-llvm
