"""Workloads like production: workload files, the formats of traces, generated sessions, and what a cache can answer.

A workload file (`pdlab.traffic.file`) is compiled (`pdlab.traffic.compiled`) to one line per request
(`pdlab.traffic.requests`). The sender, the planner, the simulator and the hit oracle read these lines alone.
"""
