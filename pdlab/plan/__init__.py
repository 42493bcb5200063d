"""Which deployment to choose: candidates, simulated and ranked; calibration of the simulator; predictions."""
