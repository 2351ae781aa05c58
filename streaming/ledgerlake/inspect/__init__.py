"""Looking at topics, tables and state from outside a running pipeline: check, lag, peek, positions,
state, delayed messages.
"""
