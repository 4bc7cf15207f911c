"""Sums over voxels behind one torch operator: plain torch (the reference, for any device) and numba for the CPU."""
