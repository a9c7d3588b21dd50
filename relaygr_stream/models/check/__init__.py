"""`relaygr model check`: the exactness properties of DESIGN §8, run on any model that keeps the protocol."""
