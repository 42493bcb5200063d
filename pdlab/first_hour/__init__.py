"""The first hour on booked nodes: its steps, how they run, and the archive that they leave."""
