"""Kernels in C for CPUs of which torch does not make as much for this; compiled on the machine they run on."""
