"""How the work of each function grows that meets lists from outside: topics, messages, brokers."""
