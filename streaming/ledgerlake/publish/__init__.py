"""Messages into topics: rows of a DataFrame, large messages with markers, and due messages through
the outbox.
"""
