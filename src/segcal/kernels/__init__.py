"""Sums over voxels: plain torch (the reference) and numba for the CPU, behind one torch operator."""
