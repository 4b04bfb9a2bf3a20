"""The side of a worker: what it sends, counts and is fed."""
