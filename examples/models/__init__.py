"""Models of other families than the built-in ones, each behind the model protocol in one file."""
