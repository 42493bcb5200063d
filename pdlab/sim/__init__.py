"""What would happen: a discrete-event simulator of a served deployment, its step times and hardware."""
