"""The replay of rejects: their entries are read again, and their rows go to the tables."""
