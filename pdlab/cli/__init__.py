"""The command lines, `python -m pdlab COMMAND`; no other package imports them."""
