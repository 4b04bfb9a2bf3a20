"""The rank that keeps the best of all: what it stores, scores, answers and saves."""
