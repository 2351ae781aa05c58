"""Looking at topics, tables and state from outside a running pipeline: verify, lag, peek,
positions, state, typed values.
"""
