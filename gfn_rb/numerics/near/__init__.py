"""Indexes of near rows, and the choice of rows that are far apart."""
