// unchanged: as after ep
