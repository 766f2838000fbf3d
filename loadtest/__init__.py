"""Load tools: an open-loop generator that can be imported, and locust scenarios."""
