"""Whether the unit tests notice a defect: fifty small ones, each put into a copy of the tree (`make mutants`)."""
