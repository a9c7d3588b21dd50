"""What travels: messages, headers, topic files, the partitioner, what workers and triggers state of themselves."""
