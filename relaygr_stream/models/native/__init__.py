"""The HSTU layers in C for CPUs with AVX2, AVX-512 or AMX, where they are faster than torch. The wheel has them."""
