"""`make soak`: random faults under load from a printed seed, over real processes; every promise is checked at the end.

traffic (what clients ask, what they get) · stage (processes, who is down) · kinds (faults) · report · run
"""
