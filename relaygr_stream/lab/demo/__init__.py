"""`relaygr demo`: the whole relay on one machine, with a client that plays a recommendation service."""
