// unchanged: as after 08_convert-cf-to-llvm
