"""The rules of schedules by id, repetition and cancels. Storage and the clock are the caller's."""
