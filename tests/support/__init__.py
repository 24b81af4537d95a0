"""Helpers of tests and rank programs: launchers, cases, comparisons."""
