"""Cases, one module for each concern; every module here has a tuple CASES, and is found by being here."""
