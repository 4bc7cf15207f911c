"""Sums over voxels: plain torch (the reference), numba for the CPU and Triton for a GPU, behind one torch operator."""
