"""The dead-letter topic for operators: what lies there, why, and sending it on its way again."""
