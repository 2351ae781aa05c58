"""``ledgerlake verify``: the rows of a table against the messages of its topics."""
