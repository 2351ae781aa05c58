"""Generated protocol buffers: ``make proto`` writes them from the ``.proto`` files beside them."""
