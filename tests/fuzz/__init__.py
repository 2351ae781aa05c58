"""Structure-aware fuzzing of everything that reads bytes or text from outside.

    engine    an input's judgement: documented errors only, bounded memory, bounded work
    mutate    how a valid input is made wrong
    seeds     the valid inputs
    of_*      the targets: one for each boundary

``python -m tests.fuzz --help`` runs it; ``test_fuzz`` runs a little of it, and the inputs that
failed before (``tests/golden/fuzz``).
"""
