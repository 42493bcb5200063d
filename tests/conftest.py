"""No test is judged by its time: hypothesis counts examples, not milliseconds."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pdlab", deadline=None)
settings.load_profile("pdlab")
