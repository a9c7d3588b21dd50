"""A feature store of a user's own behind the relay's HistoryStore: docs/how-to/history.md explains it."""
