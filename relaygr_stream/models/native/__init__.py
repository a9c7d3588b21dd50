"""The HSTU layers in C for CPUs with AMX or AVX-512, where they are faster than torch. The wheel has them."""
