"""Runs: a trainer at work in a folder, alone or as one of several ranks."""
