"""Frames over a transport."""
