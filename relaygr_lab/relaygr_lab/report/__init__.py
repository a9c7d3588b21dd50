"""What a run of `relaygr bench slo` or `bench paper` says: one judge, and pages and tables made of the same blocks."""
