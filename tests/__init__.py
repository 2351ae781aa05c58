"""Tests: one folder per room, ``live`` against the embedded broker, ``golden`` for bytes that must
stay readable.
"""
