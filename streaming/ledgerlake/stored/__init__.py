"""What later releases must read: checked JSON, files that are replaced whole, and the offset of a
checkpoint.
"""
