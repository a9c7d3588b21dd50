"""The laboratory: demo, workloads, benchmarks, simulation. It imports what serves, never the reverse."""
