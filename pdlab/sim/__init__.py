"""A discrete-event simulator of a served deployment, with step times and hardware."""
