"""Which group a worker or a trigger serves, and how its process changes from one to another."""
