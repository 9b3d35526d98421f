// unchanged: as after 03_declare-shared
