"""Messages between managers and workers, and the records that each keeps of the others."""
