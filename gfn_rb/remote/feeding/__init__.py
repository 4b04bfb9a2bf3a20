"""Objects that a manager holds, and the choice of those that a worker is given next."""
