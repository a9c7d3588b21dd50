"""How many workers each scenario wants."""
