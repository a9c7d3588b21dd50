"""Workers with emulated devices: real processes whose device takes the time of a cost file, and computes nothing."""
