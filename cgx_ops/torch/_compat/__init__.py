"""All uses of torch's private interfaces, which may change with each release.

Tested with torch 2.13 and 2.11.
"""
