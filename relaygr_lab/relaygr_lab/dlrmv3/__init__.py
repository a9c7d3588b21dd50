"""`relaygr bench dlrmv3`: the relay behind MLCommons' LoadGen, with DLRMv3's traffic and model."""
