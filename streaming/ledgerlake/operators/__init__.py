"""Stateful stages: what outlives a micro-batch. The rules are ``state``'s; here is how they meet Spark."""
