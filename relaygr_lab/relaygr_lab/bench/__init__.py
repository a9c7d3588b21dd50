"""`relaygr bench slo`: the largest rate and length within the same P99, for each mode of serving."""
