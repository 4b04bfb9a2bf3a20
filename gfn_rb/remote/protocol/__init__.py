"""What managers and workers send each other, and what they know of each other."""
