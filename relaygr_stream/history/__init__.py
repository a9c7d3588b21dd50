"""Where users' histories are kept, so that messages may refer to them: the protocol, and stores that implement it."""
