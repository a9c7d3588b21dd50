"""The laboratory: demo, benches, simulation. It imports what serves (relaygr_stream), never the reverse."""
