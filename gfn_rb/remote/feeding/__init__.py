"""Which objects are held, and which of them a worker is given next."""
