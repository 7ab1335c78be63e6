"""What tests, the demo and benchmarks share: engines to drive, checkpoints, a virtual cluster.

Nothing here is imported by the planner, the store or the connector.
"""

from kvfold.testing.drain import NotDrained, drain

__all__ = ["NotDrained", "drain"]
