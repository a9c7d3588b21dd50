"""Models trained elsewhere: reads their checkpoints, and compares them with arrays of their own code."""
