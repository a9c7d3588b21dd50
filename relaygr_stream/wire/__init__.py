"""The wire format: messages, headers, topic files, the partitioner, statuses of workers and triggers."""
