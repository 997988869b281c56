"""Know before you run: what fits, how fast it will be, how far it scales."""
