"""Production-like workloads: workload files, the formats of traces, generated sessions, and prefix-cache hits.

A workload file (`pdlab.traffic.file`) is compiled (`pdlab.traffic.compiled`) to one line per request
(`pdlab.traffic.requests`). The sender, the planner, the simulator and the hit oracle read only these lines.
"""
