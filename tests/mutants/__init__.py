"""Which defects the unit tests let pass: defects are made in modules, one at a time (`make mutants`)."""
