"""A simulator of the whole pipeline in one process: one seed is one history. See ``oracle`` for
what must hold.
"""
