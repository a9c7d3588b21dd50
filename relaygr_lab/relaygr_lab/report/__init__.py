"""What a run of `relaygr bench slo` or `bench paper` says.

`commands` runs both; `slo_readings` and `paper_readings` read what was measured; `judge` says how much of what is
possible is reached; `make` puts the report together, which is report.json; `slo` and `paper` show it as `blocks`, with
`slo_charts` and `paper_charts`; `conditions` says under which conditions.
"""
