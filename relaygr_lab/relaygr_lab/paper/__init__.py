"""`relaygr bench paper`: each claim of the relay measured on a fleet of emulated devices, beside an oracle queue."""
