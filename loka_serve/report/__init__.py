"""The bundle's report: what is FP8, what is not, why, and what it gained, as JSON and as one page of HTML."""
