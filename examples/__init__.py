"""Whole programs around the package, to read and to copy from."""
