"""Which engines of a fluid pool prefill and which decode: a controller that explains itself; standard library only."""
