"""Checks order, scope, races, barriers and bounds of kernels as the simulator runs them."""
