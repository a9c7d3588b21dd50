"""The wire format: messages, their codec, headers, topic files, the partitioner, statuses of workers and triggers."""
