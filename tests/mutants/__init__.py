"""Whether the unit tests notice a defect."""
