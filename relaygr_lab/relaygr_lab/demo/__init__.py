"""`relaygr demo`: the whole relay on one machine, with a client that acts as a recommendation service."""
