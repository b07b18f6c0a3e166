"""The trusted side: the reference, the inputs, the comparison, the clock, and what they come to."""
