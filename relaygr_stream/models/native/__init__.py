"""Kernels in C for CPUs whose instructions torch does not use for this; compiled on the machine they run on."""
