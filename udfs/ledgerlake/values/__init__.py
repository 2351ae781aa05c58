"""Typed values: the schemas of Pulsar's registry, their bytes as Arrow columns, and queries over
rows.
"""
