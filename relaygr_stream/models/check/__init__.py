"""`relaygr model check`: exactness (docs/explanation/exactness.md), checked on any model that keeps the protocol."""
