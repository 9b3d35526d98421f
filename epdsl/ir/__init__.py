"""The `ep` dialect, its builder, types, locations and verifier."""
