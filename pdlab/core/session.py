"""The name of a request's session, from the load generator to the router of an engine."""

from __future__ import annotations

SESSION_HEADER = "x-session-id"
