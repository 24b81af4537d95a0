"""Outer loops that lose ranks within an average and regroup: faults, an oracle, the ranks."""
