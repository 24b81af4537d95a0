"""What tests and rank programs share: launchers, cases, comparisons."""
