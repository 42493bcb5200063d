"""Ray nodes, those of a running cluster or made on this machine: the connection, local nodes, two hosts."""
